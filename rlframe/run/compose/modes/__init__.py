"""Compositions of the modes that do not train: evaluate, generate, self_test."""
