"""One file per reward, and the judge that runs them in light processes with a time limit. None imports torch."""
