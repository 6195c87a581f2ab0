"""Files of a distributed checkpoint: each rank writes its own with a checksum of every entry, and reads it back.

The format is torch's (`torch.distributed.checkpoint`, one file of `torch.save` entries per rank and a `.metadata` that
finds them), as Megatron's `torch_dist` backend writes it. torch's `FileSystemWriter` writes it, into files that keep
the checksum of what passes. Nothing here communicates, so that it can run in a thread during training; the caller
exchanges data between ranks. (`dcp.async_save` would need a process group of its own, whose collectives hang if a rank
dies.)

`checksums` stores their checksums, and `reading` reads them.
"""

import io
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from rlframe.megatron.checkpoint.checksums import CHECKSUMS, THIS_FILE, Entry, check, write_entries
from rlframe.utils.files import writing

SLAB_BYTES = 1 << 30
"""Bytes of a piece of pinned memory, because torch rounds each up to a power of two."""
ALIGNMENT_BYTES = 64


@dataclass(kw_only=True)
class Staged:
    """The data that one rank has to write. `stage_on_host` makes it independent of the live training state."""

    folder: Path
    rank: int
    """Index of the rank."""
    items: list[tuple[WriteItem, Any]]
    """Tensors on any device, or `io.BytesIO` for other objects."""
    metadata: Metadata | None
    """Pieces on all ranks. On rank 0 only."""
    fetch: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Called with each tensor when it is written, so that it can be computed from something else."""

    def stage_on_host(self) -> None:
        """Copies every tensor to host memory, pinned if it comes from a GPU. The originals may change afterwards."""
        slabs = _Slabs()
        self.items = [(item, slabs.copy(value) if isinstance(value, Tensor) else value) for item, value in self.items]
        if any(isinstance(value, Tensor) and value.is_pinned() for _, value in self.items):
            torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The result of one rank's writing. It can be pickled."""

    results: list[WriteResult]
    """Position of each piece."""
    entries: list[Entry]
    write_s: float
    """Seconds until the file was on the disk."""
    verify_s: float
    """Seconds of reading it back. 0 if that was not requested."""


class _Slabs:
    """Host memory for many tensors in few allocations."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, value: Tensor) -> Tensor:
        """Returns a copy of `value`, complete once the device has been synchronized."""
        value = value.detach()
        first = -(-self._used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if value.is_cuda != self._slab.is_pinned() or first + value.nbytes > self._slab.nbytes:
            size = max(SLAB_BYTES, value.nbytes) if value.is_cuda else value.nbytes
            self._slab, first = torch.empty(size, dtype=torch.uint8, pin_memory=value.is_cuda), 0
        self._used = first + value.nbytes
        place = self._slab[first : self._used].view(value.dtype).view(value.shape)
        return place.copy_(value, non_blocking=True)


class _Summed(io.RawIOBase):
    """A file that computes the CRC of the data written to it, at each flush."""

    def __init__(self, file: io.BufferedIOBase):
        super().__init__()
        self._file = file
        self._position = 0
        self._crc32 = 0
        self.crc32_at = {0: 0}
        """Checksum of the file from its beginning to this byte, by byte."""
        self.failure: OSError | None = None
        """The system's error when it refused to write."""

    def write(self, data: Any) -> int:
        """Writes `data` to the file."""
        try:
            count = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._crc32 = zlib.crc32(data, self._crc32)
        self._position += count
        return count

    def flush(self) -> None:
        """Flushes the file. torch calls it after each entry."""
        if not self._file.closed:
            try:
                self._file.flush()
            except OSError as error:
                self.failure = error
                raise
            self.crc32_at[self._position] = self._crc32

    def tell(self) -> int:
        """Returns the number of bytes written."""
        return self._position

    def fileno(self) -> int:
        """Returns the file's descriptor, with which torch synchronizes it."""
        return self._file.fileno()


class _SummedFiles(FileSystem):
    """Opens files for torch's writer, and keeps their checksums after they are closed."""

    def __init__(self) -> None:
        self.opened: dict[str, _Summed] = {}
        """Files by name."""

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a file for writing."""
        assert mode == "wb", "nothing is read through it"
        with writing(Path(path)), Path(path).open("wb") as file:
            stream = self.opened[Path(path).name] = _Summed(file)
            try:
                yield stream
            except RuntimeError:
                # torch 2.13 counts the bytes that a full disk did not take, and says "unexpected pos 704 vs 598".
                if stream.failure:
                    raise stream.failure from None
                raise


class _Values(DefaultSavePlanner):
    """Supplies torch's writer with the staged data."""

    def __init__(self, staged: Staged):
        super().__init__()
        self._fetch = staged.fetch
        self._values: dict[MetadataIndex, Any] = {item.index: value for item, value in staged.items}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Returns a tensor, fetched now, or the bytes of another object."""
        value = self._values[write_item.index]
        if write_item.type is WriteItemType.BYTE_IO:
            return value
        # A copy: what torch saves of the live memory of a CPU could change between two reads of it.
        return self._fetch(value).to("cpu", copy=True).contiguous()


def write(staged: Staged, *, verify: bool) -> Written:
    """Writes this rank's file and, with `verify`, compares the disk's content with the memory's.

    Raises:
        OutputError: the file cannot be written; the message has the system's error.
        CheckpointError: the file reads back differently.
    """
    started = time.monotonic()
    results, entries = _write_file(staged) if staged.items else ([], [])
    written = time.monotonic()
    if verify:
        check(staged.folder, entries, advice="the disk or the network to it loses data; use another one")
    return Written(results=results, entries=entries, write_s=written - started, verify_s=time.monotonic() - written)


def _write_file(staged: Staged) -> tuple[list[WriteResult], list[Entry]]:
    # One tensor at a time on one thread, none copied ahead: what `fetch` makes is large.
    writer = FileSystemWriter(staged.folder, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files = _SummedFiles()
    writer.set_up_storage_writer(is_coordinator=staged.metadata is not None)
    # A rank's file is named after its place among the plans of all.
    plans = [SavePlan(items=[])] * staged.rank + [SavePlan(items=[item for item, _ in staged.items])]
    plan = writer.prepare_global_plan(plans)[staged.rank]
    # It has been done by now: one thread wrote it, this one.
    results = writer.write_data(plan, _Values(staged)).value()
    ((name, stream),) = files.opened.items()
    return results, list(_entries(name, stream, results))


def _entries(file: str, stream: _Summed, results: Iterable[WriteResult]) -> Iterator[Entry]:
    """Yields the stretches of a file, which are consecutive in the order of `results`."""
    offset = 0
    for result in results:
        where = f" at {list(result.index.offset)}" if result.index.offset else ""
        end = offset + result.size_in_bytes
        yield Entry(file, f"{result.index.fqn}{where}", offset, result.size_in_bytes, stream.crc32_at[end])
        offset = end


def seal(staged: Staged, written: Iterable[Written]) -> None:
    """Writes `.metadata`, which locates every piece, and the checksums of all files. Runs on rank 0, after all ranks
    have written.

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
