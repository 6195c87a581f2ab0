"""Care for a process: its start and what is told meanwhile, its memory, and the processes that it starts or meets."""
