"""Every setting with its type, default and docstring, for `--help` and for completion. Imports no torch."""
