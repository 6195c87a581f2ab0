"""One run: its configuration, the checks of it, and the composition of its parts."""
