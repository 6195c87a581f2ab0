"""The folder `data.cache_folder`: files named after the SHA-256 of what decides them, within a bound.

A file is written aside and renamed. To keep the folder within its bound, the files not read for longest are removed.
The folder is safe to delete at any time: a mapped file stays readable.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlframe.data.config import AUTO, DataConfig
from rlframe.data.records import is_data

OURS = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{64}\.records|\.items|\..*\.partial)")
"""Pattern of the names of rlframe's files. A partial file is being written, or remains from a crash."""


def cache_folder(config: DataConfig) -> Path | None:
    """Returns the folder, or None if nothing is to be kept."""
    if config.cache_folder is None:
        return None
    if config.cache_folder == AUTO:
        return (Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rlframe" / "data").expanduser()
    return Path(config.cache_folder).expanduser()


def evict(folder: Path, most_bytes: float, *, besides: Path | None = None) -> None:
    """Removes the files of the folder that were not read for longest until the rest has at most `most_bytes`. Files of
    others stay and do not count, nor does the file `besides`."""
    known: list[tuple[int, int, Path]] = []
    for file in folder.iterdir():
        if OURS.fullmatch(file.name) and file != besides:
            # Another run may have removed or renamed it meanwhile.
            with suppress(FileNotFoundError):
                found = file.stat()
                known.append((found.st_mtime_ns, found.st_size, file))
    total = 0
    for _, size, file in sorted(known, reverse=True):
        total += size
        if total > most_bytes:
            file.unlink(missing_ok=True)


def files_of(place: Path) -> Iterator[Path]:
    """Yields the files of a folder, or the file, in the order in which they are read. Folders within are not read."""
    if place.is_dir():
        yield from sorted(file for file in place.iterdir() if is_data(file) and file.is_file())
    else:
        yield place


def digest_of(file: Path) -> bytes:
    """Returns the SHA-256 of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()
