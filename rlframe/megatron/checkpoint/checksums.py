"""The list of a distributed checkpoint's contents: every stretch of every file with its checksum. Imports no torch.

The checksum is a CRC-32 of the file's bytes, taken on their way from memory to the file, and running: that of a stretch
is of the file from its beginning to the end of the stretch, so that the last one is that of the whole file. Of bytes
rather than values, so that reading back is one plain pass over the file, with nothing to deserialise and no tensor in
memory. A CRC finds every burst of up to 32 wrong bits and all but one in 4e9 of other damage; a sum, which torch would
do faster, misses blocks that changed places. zlib's runs at 2 GB/s a core without Python's lock, faster than most
disks. The list itself is sealed by a SHA-256.
"""

import os
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.sealed import read_sealed, write_sealed

CHECKSUMS = "checksums.json"
FORMAT = 2
CHUNK_BYTES = 1 << 24
"""Bytes that are read at once when a file is checked."""
THIS_FILE = "this file"
"""Name of the one stretch of a small file."""


class Entry(NamedTuple):
    """A stretch of a file, and the checksum of its bytes in memory."""

    file: str
    """Name of the file in the checkpoint's folder."""
    name: str
    """Name of the content, for messages."""
    offset: int
    length: int
    """Number of bytes."""
    crc32: int
    """Checksum of the file from its beginning to the end of this stretch."""


def write_entries(folder: Path, entries: Iterable[Entry]) -> None:
    """Writes the list of a folder, which is complete or absent.

    Raises:
        OutputError: it cannot be written.
    """
    ordered = sorted(entries, key=lambda entry: (entry.file, entry.offset, entry.length))
    write_sealed(folder / CHECKSUMS, {"format": FORMAT, "entries": ordered})


def read_entries(folder: Path) -> list[Entry]:
    """Returns every entry of a folder's list, by file and offset; together they cover each file from end to end.

    Raises:
        CheckpointError: the list is missing, changed or of another format.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist, so the checkpoint cannot be verified; with checkpoint.verify=false it is read as "
            "it is"
        )
    try:
        content = read_sealed(path)
    except CheckpointError as error:
        if path.is_file() and path.read_bytes()[:1] == b"[":
            raise CheckpointError(
                f"{path} is the unsealed list that rlframe wrote before checkpoints were sealed (format 1), or is "
                "damaged; with checkpoint.verify=false, or without this file, the weights beside it are read unverified"
            ) from error
        raise CheckpointError(f"{error}; {advice(folder)}") from error
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this rlframe reads format {FORMAT}")
    return [Entry(*fields) for fields in content["entries"]]


def whole_files(entries: Iterable[Entry]) -> dict[str, tuple[int, int]]:
    """Returns (bytes, CRC-32) of every file in the entries."""
    return {entry.file: (entry.offset + entry.length, entry.crc32) for entry in sorted(entries, key=lambda e: e[2:4])}


def verify_share(folder: Path, *, rank: int, world: int) -> None:
    """Compares this rank's share of the folder with its checksums. All ranks together read all of it.

    Raises:
        CheckpointError: a file is missing, added, of another length or changed; the message names it and the tensor.
    """
    entries = read_entries(folder)
    _require_files(folder, whole_files(entries))
    total = sum(entry.length for entry in entries) or 1
    mine, passed = [], 0
    for entry in entries:
        if passed * world // total == rank:
            mine.append(entry)
        passed += entry.length
    check(folder, mine, among=entries, advice=advice(folder))


def advice(folder: Path) -> str:
    """Returns what to do about the damaged `folder`, which is part of a run's checkpoint or stands alone."""
    if folder.parent.name.startswith("step-"):
        return f"delete {folder.parent} to go on from the checkpoint before it"
    return "make it anew, or take another"


def _require_files(folder: Path, files: dict[str, tuple[int, int]]) -> None:
    found = {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for name in sorted(found - set(files)):
        raise CheckpointError(f"{folder / name} is not part of what was written there; move it away")
    for name, (length, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} cannot be read: it is not there, or no file; {advice(folder)}")
        if path.stat().st_size > length:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size} bytes, written were {length}; {advice(folder)}"
            )


def check(folder: Path, entries: Iterable[Entry], *, among: Iterable[Entry] | None = None, advice: str) -> None:
    """Raises CheckpointError, ending with `advice`, unless the files contain what was written.

    Args:
        among: all entries of the files, if `entries` are only some of them.
    """
    entries = list(entries)
    before = {(entry.file, entry.offset + entry.length): entry.crc32 for entry in among or entries}
    for name, group in groupby(sorted(entries), key=lambda entry: entry.file):
        path = folder / name
        try:
            with path.open("rb") as file:
                # What the page cache still holds was never read from the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for entry in group:
                    _check_entry(file, path, entry, before.get((name, entry.offset), 0), advice)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {advice}") from error


def _check_entry(file: Any, path: Path, entry: Entry, crc32: int, advice: str) -> None:
    file.seek(entry.offset)
    left = entry.length
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise CheckpointError(
                f"{path} is truncated: it ends {left} bytes before the end of {entry.name}, at byte "
                f"{entry.offset + entry.length}; {advice}"
            )
        crc32 = zlib.crc32(chunk, crc32)
        left -= len(chunk)
    if crc32 != entry.crc32:
        raise CheckpointError(
            f"{path} is damaged: {entry.name}, bytes {entry.offset} to {entry.offset + entry.length}, reads back with "
            f"CRC-32 {crc32:08x}, written was {entry.crc32:08x}; {advice}"
        )
