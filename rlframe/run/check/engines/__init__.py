"""Rules about what engines must be able to do for a run."""
