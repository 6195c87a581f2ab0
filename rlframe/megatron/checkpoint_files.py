"""Files of a distributed checkpoint: each rank writes its own with a checksum of every entry, and reads it back.

The format is torch's (`torch.distributed.checkpoint`, one file of `torch.save` entries per rank and a `.metadata` that
finds them), as Megatron's `torch_dist` backend writes it. Nothing here communicates, so that it can run on a thread
beside training; what ranks must tell each other passes through the caller.

The checksum is a CRC-32 of the file's bytes, taken on their way from memory to the file. Of bytes rather than values,
so that reading back is one plain pass over the file, with nothing to deserialise and no tensor in memory. A CRC finds
every burst of up to 32 wrong bits and all but one in 4e9 of other damage; a sum, which torch would do faster, misses
blocks that changed places. zlib's runs at 2 GB/s a core without Python's lock, faster than most disks.
"""

import io
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from rlframe.utils.errors import CheckpointError

MANIFEST = "checksums.json"
CHUNK_BYTES = 1 << 24
"""Read at once when a file is checked."""
SLAB_BYTES = 1 << 30
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""
ALIGNMENT_BYTES = 64


class Entry(NamedTuple):
    """A stretch of a file, and the checksum of its bytes as they were in memory."""

    file: str
    """Name in the checkpoint's folder."""
    name: str
    """What it holds, for messages."""
    offset: int
    length: int
    """Bytes."""
    crc32: int


@dataclass(kw_only=True)
class Staged:
    """What one rank has to write. `stage_on_host` makes it independent of the live training state."""

    folder: Path
    file: str
    """Name of this rank's file."""
    items: list[tuple[WriteItem, Any]]
    """Tensors on any device, or `io.BytesIO` of what is no tensor."""
    metadata: Metadata | None
    """Which pieces there are on all ranks; on rank 0 only."""
    fetch: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Called with each tensor when its turn has come: a place to make it from something else."""

    def stage_on_host(self) -> None:
        """Copy every tensor to host memory, pinned where it comes from a GPU; the originals may then change."""
        slabs = _Slabs()
        self.items = [(item, slabs.copy(value) if isinstance(value, Tensor) else value) for item, value in self.items]
        if any(isinstance(value, Tensor) and value.is_pinned() for _, value in self.items):
            torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What one rank has written. It pickles."""

    results: list[WriteResult]
    """Where each piece lies."""
    entries: list[Entry]
    write_s: float
    """Until the file was on the disk."""
    verify_s: float
    """Reading it back; 0 where that was not asked for."""


class _Slabs:
    """Host memory for many tensors in few allocations."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, value: Tensor) -> Tensor:
        """A copy of `value`, complete once the device has been synchronized."""
        value = value.detach()
        first = -(-self._used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if value.is_cuda != self._slab.is_pinned() or first + value.nbytes > self._slab.nbytes:
            size = max(SLAB_BYTES, value.nbytes) if value.is_cuda else value.nbytes
            self._slab, first = torch.empty(size, dtype=torch.uint8, pin_memory=value.is_cuda), 0
        self._used = first + value.nbytes
        place = self._slab[first : self._used].view(value.dtype).view(value.shape)
        return place.copy_(value, non_blocking=True)


class _Summed:
    """A file that keeps the CRC of what is written to it."""

    def __init__(self, file: io.BufferedIOBase):
        self._file = file
        self.position = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Pass `data` on."""
        self.crc32 = zlib.crc32(data, self.crc32)
        count = self._file.write(data)
        self.position += count
        return count

    def flush(self) -> None:
        """torch.save calls it after each tensor; the file is flushed once, at its end."""


def write(staged: Staged, *, verify: bool) -> Written:
    """Write this rank's file and, with `verify`, compare what the disk gives back with what was in memory.

    Raises:
        CheckpointError: the file cannot be written, or reads back otherwise than it was written.
    """
    started = time.monotonic()
    path = staged.folder / staged.file
    try:
        results, entries = _write_file(path, staged) if staged.items else ([], [])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    written = time.monotonic()
    if verify:
        check(staged.folder, entries, advice="the disk or the network to it loses data; use another one")
    return Written(results=results, entries=entries, write_s=written - started, verify_s=time.monotonic() - written)


def _write_file(path: Path, staged: Staged) -> tuple[list[WriteResult], list[Entry]]:
    results, entries = [], []
    with path.open("wb") as file:
        stream = _Summed(file)
        for item, value in staged.items:
            offset, stream.crc32 = stream.position, 0
            if isinstance(value, Tensor):
                # One tensor at a time: torch.save writes the whole memory that a view is part of.
                torch.save(staged.fetch(value).to("cpu", copy=True).contiguous(), stream)
            else:
                stream.write(value.getbuffer())
            length = stream.position - offset
            place = _StorageInfo(staged.file, offset, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
            where = f" at {list(item.index.offset)}" if item.index.offset else ""
            entries.append(Entry(staged.file, f"{item.index.fqn}{where}", offset, length, stream.crc32))
        file.flush()
        os.fsync(file.fileno())
    return results, entries


def seal(staged: Staged, written: Iterable[Written]) -> None:
    """Rank 0, when all have written: `.metadata`, which finds every piece, and the checksums of all files."""
    assert staged.metadata is not None, "only rank 0 knows all pieces"
    written = list(written)
    FileSystemWriter(staged.folder).finish(staged.metadata, [each.results for each in written])
    entries = [entry for each in written for entry in each.entries]
    mine = {entry.file for entry in entries} | {MANIFEST}
    # Megatron's own small files: their checksums are of the files, they guard them from now on.
    for path in sorted(staged.folder.iterdir()):
        if path.name not in mine:
            content = path.read_bytes()
            entries.append(Entry(path.name, "this file", 0, len(content), zlib.crc32(content)))
    (staged.folder / MANIFEST).write_text(json.dumps(entries), encoding="utf-8")


def read_manifest(folder: Path) -> list[Entry]:
    """Every entry of a checkpoint.

    Raises:
        CheckpointError: the list is missing or garbled.
    """
    path = folder / MANIFEST
    try:
        return [Entry(*fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist, so the checkpoint cannot be verified; with checkpoint.verify=false it is read as "
            "it is"
        ) from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is garbled: {error}; {advice(folder)}") from error


def verify_share(folder: Path, *, rank: int, world: int) -> None:
    """Compare this rank's share of the checkpoint in `folder` with its checksums; all ranks together read all of it.

    Raises:
        CheckpointError: a file is missing, truncated or changed; names it and the tensor.
    """
    entries = sorted(read_manifest(folder))
    total = sum(entry.length for entry in entries) or 1
    mine, passed = [], 0
    for entry in entries:
        if passed * world // total == rank:
            mine.append(entry)
        passed += entry.length
    check(folder, mine, advice=advice(folder))


def advice(folder: Path) -> str:
    """What to do about a damaged checkpoint: `folder` is its part with the training state."""
    return f"delete {folder.parent} to go on from the checkpoint before it"


def check(folder: Path, entries: Iterable[Entry], *, advice: str) -> None:
    """Raises CheckpointError, ending with `advice`, unless the files give back what was written."""
    for name, group in groupby(sorted(entries), key=lambda entry: entry.file):
        path = folder / name
        try:
            with path.open("rb") as file:
                # What the page cache still holds was never read from the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for entry in group:
                    _check_entry(file, path, entry, advice)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; {advice}") from error


def _check_entry(file: Any, path: Path, entry: Entry, advice: str) -> None:
    file.seek(entry.offset)
    left, crc32 = entry.length, 0
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
