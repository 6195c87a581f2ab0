"""Algorithms, one file each, in pure torch. A file ends `COMPONENT, CONFIG = TheAlgorithm, TheConfig`; its name is the
value of `algorithm.name`."""
