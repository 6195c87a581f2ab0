"""Weights and optimizer state that are kept in host memory at times."""
