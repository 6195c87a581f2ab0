"""Attention of decode steps that reads what several sequences have in common, such as their prompt, once."""
