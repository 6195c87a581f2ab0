"""Records that do not fit in memory as objects: in mapped files, within a bound."""
