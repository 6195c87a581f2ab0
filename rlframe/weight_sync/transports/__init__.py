"""Transports of bytes from a source rank to a destination rank. One file each, ending in `TRANSPORT = TheClass`."""

PACKAGE = __name__
"""Name under which `registry` finds the transports."""
