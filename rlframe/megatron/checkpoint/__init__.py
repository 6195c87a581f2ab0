"""Distributed checkpoints: `checksums` says what a folder holds, `files` writes it, `pieces` says what torch is to
write and read, `moments` and `state` what there is of a model, `reading` reads a folder without running what is in it.
Import `pieces`, `moments`, `state` and `reading` after `platform.install`."""
