"""How bytes get from a source rank to a destination rank. One file each, ending in `TRANSPORT = TheClass`."""
