"""Positions of the parts of Hugging Face tensors in a process's memory, recorded from loaders."""
