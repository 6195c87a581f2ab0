"""Rewards, one file each, and the processes that run them with a time limit. None imports torch."""
