"""Weights and optimizer state that lie in host memory for a while."""
