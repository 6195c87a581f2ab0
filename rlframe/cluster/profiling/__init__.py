"""Profiles of single steps: what is recorded in a process, and what its trace says."""
