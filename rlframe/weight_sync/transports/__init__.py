"""Transports of bytes from a source rank to a destination rank. One file each, ending in `TRANSPORT = TheClass`."""
