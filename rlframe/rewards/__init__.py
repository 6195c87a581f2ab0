"""One file per reward, and the runner of them in light processes with a time limit. None imports torch."""
