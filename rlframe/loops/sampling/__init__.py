"""Samplers: the sources of a step's scored groups."""
