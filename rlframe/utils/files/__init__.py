"""Files that a crash leaves whole: written at once or not at all, line by line, sealed, in a folder with a lock."""
