"""Distributed checkpoints: `checksums` says what a folder holds, `files` writes it, `pieces` and `state` say what is in
a model's, `reading` reads one without running what is in it. Import `pieces` and `state` after `platform.install`."""
