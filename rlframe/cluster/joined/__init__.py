"""A Ray cluster that was there before the run: its nodes, what the run needs of them, and Ray's jobs."""
