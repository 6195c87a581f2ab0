"""Reports of a run, during it and at its end."""
