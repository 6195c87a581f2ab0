"""Where each piece of each Hugging Face tensor lies in a process's memory, recorded from loaders."""
