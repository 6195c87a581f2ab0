"""Distributed checkpoints. `checksums` lists the contents of a folder, `files` writes it, `pieces` plans what torch
writes and reads, `moments` and `state` collect the state of a model, and `reading` reads a folder without running code
from it. Import `pieces`, `moments`, `state` and `reading` after `platform.install`."""
