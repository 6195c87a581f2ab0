"""Files of a distributed checkpoint: each rank writes its own with a checksum of every entry, and reads it back.

The format is torch's (`torch.distributed.checkpoint`, one file of `torch.save` entries per rank and a `.metadata` that
finds them), as Megatron's `torch_dist` backend writes it. Nothing here communicates, so that it can run on a thread
beside training; what ranks must tell each other passes through the caller.

See `checksums` for what is kept of them, and `reading` for how they are read.
"""

import io
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from rlframe.megatron.checkpoint.checksums import CHECKSUMS, THIS_FILE, Entry, check, write_entries
from rlframe.utils.files import writing

SLAB_BYTES = 1 << 30
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""
ALIGNMENT_BYTES = 64


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
    """A file that keeps the CRC of what has been written to it."""

    def __init__(self, file: io.BufferedIOBase):
        self._file = file
        self.position = 0
        self.crc32 = 0
        self.failure: OSError | None = None
        """What the system said when it refused to write."""

    def write(self, data: Any) -> int:
        """Passes `data` on."""
        try:
            count = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.position += count
        return count

    def flush(self) -> None:
        """torch.save calls it after each tensor; the file is flushed once, at its end."""


def write(staged: Staged, *, verify: bool) -> Written:
    """Writes this rank's file and, with `verify`, compares what the disk gives back with what was in memory.

    Raises:
        OutputError: the file cannot be written; says what the system said.
        CheckpointError: the file reads back otherwise than it was written.
    """
    started = time.monotonic()
    path = staged.folder / staged.file
    with writing(path):
        results, entries = _write_file(path, staged) if staged.items else ([], [])
    written = time.monotonic()
    if verify:
        check(staged.folder, entries, advice="the disk or the network to it loses data; use another one")
    return Written(results=results, entries=entries, write_s=written - started, verify_s=time.monotonic() - written)


def _write_file(path: Path, staged: Staged) -> tuple[list[WriteResult], list[Entry]]:
    results, entries = [], []
    with path.open("wb") as file:
        stream = _Summed(file)
        for item, value in staged.items:
            offset = stream.position
            if isinstance(value, Tensor):
                # One tensor at a time: torch.save writes the whole memory that a view is part of.
                _save_tensor(staged.fetch(value).to("cpu", copy=True).contiguous(), stream)
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


def _save_tensor(tensor: Tensor, stream: _Summed) -> None:
    try:
        torch.save(tensor, stream)
    except RuntimeError:
        # torch 2.13 counts the bytes that a full disk did not take, and says "unexpected pos 704 vs 598".
        if stream.failure:
            raise stream.failure from None
        raise


def seal(staged: Staged, written: Iterable[Written]) -> None:
    """Rank 0, when all have written: `.metadata`, which finds every piece, and the checksums of all files.

    Raises:
        OutputError: one of the two cannot be written.
    """
    assert staged.metadata is not None, "only rank 0 knows all pieces"
    written = list(written)
    with writing(staged.folder):
        FileSystemWriter(staged.folder).finish(staged.metadata, [each.results for each in written])
        entries = [entry for each in written for entry in each.entries]
        mine = {entry.file for entry in entries} | {CHECKSUMS}
        # Megatron's own small files: their checksums are of the files, they guard them from now on.
        for path in sorted(staged.folder.iterdir()):
            if path.name not in mine:
                content = path.read_bytes()
                entries.append(Entry(path.name, THIS_FILE, 0, len(content), zlib.crc32(content)))
    write_entries(staged.folder, entries)
