"""Writes a large file with several threads: copies, sums and writes a chunk at a time, and reads some back meanwhile.

Each chunk is copied to a buffer, its CRC-32 is taken of the buffer while it is in the processor's cache, and the buffer
is written past the page cache (O_DIRECT), so that nothing waits for the cache to be emptied and reading back comes from
the disk. A chunk is read back some chunks later. Where the file system has no such writes, it is read back in the end,
after the file has been flushed and dropped from the page cache. The file's room on the disk is taken at once, so that
a full disk is noticed before anything is written, and so that threads need not wait for each other to extend it.

Source: the scheme of many threads with a chunk each is that of `torch.distributed.checkpoint`'s and NVIDIA's
asynchronous writers; theirs go through the page cache and do not read back.
"""

import errno
import mmap
import os
import time
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Semaphore
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlframe.megatron.checkpoint.crc import combined
from rlframe.megatron.checkpoint.image import Part
from rlframe.utils.errors import CheckpointError

CHUNK_BYTES = 1 << 23
PAGE_BYTES = 4096
"""Multiple of a disk's blocks, at which writes past the page cache begin and end."""
THREADS = 4
"""Threads of a rank that write. They wait for the disk most of the time."""
LAG_CHUNKS = 16
"""Number of chunks that are written before the first is read back: more than a disk still writes."""
LOST = "the disk or the network to it loses data; use another one"


class Chunk(NamedTuple):
    """Consecutive bytes of a file that are written at once."""

    offset: int
    length: int
    sources: list[tuple[int, Tensor]]
    """Place in the chunk, and the bytes that belong there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report on a file that was written."""

    crc32_at: dict[int, int]
    """CRC-32 of the file from its beginning to each of the requested bytes."""
    write_s: float
    """Seconds until the file was on the disk. Most of it has been read back by then."""
    verify_s: float
    """Further seconds until the rest was read back. 0 if that was not requested."""


def write_file(path: Path, parts: Iterable[Part], *, ends: Sequence[int], read_back: float) -> Report:
    """Writes a file, and flushes it to the disk.

    Args:
        parts: its content without gaps. Values of tensors may be on any device; a few chunks at a time are kept.
        ends: bytes of the file, in ascending order, up to which a checksum is wanted; the last is its length.
        read_back: fraction of the chunks to read back and compare, evenly spread; the first and the last are among
            them. 0 reads none.

    Raises:
        OSError: the system refused.
        CheckpointError: the file reads back differently.
    """
    started = time.monotonic()
    file = _File(path, ends, read_back)
    try:
        with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
            file.write(pool, chunks(parts))
            file.flush()
            written = time.monotonic()
            file.verify_rest(pool)
    finally:
        os.close(file.descriptor)
    sums = file.sums()
    return Report(crc32_at=sums, write_s=written - started, verify_s=time.monotonic() - written if read_back else 0.0)


def chunks(parts: Iterable[Part]) -> Iterator[Chunk]:
    """Yields the chunks of a file."""
    sources: list[tuple[int, Tensor]] = []
    offset = used = 0
    for part in parts:
        left = bytes_of(part)
        while left.numel():
            taken = left[: CHUNK_BYTES - used]
            sources.append((used, taken))
            left, used = left[taken.numel() :], used + taken.numel()
            if used == CHUNK_BYTES:
                yield Chunk(offset, used, sources)
                sources, offset, used = [], offset + used, 0
    if used:
        yield Chunk(offset, used, sources)


def bytes_of(part: Part) -> Tensor:
    """Returns the bytes of a part, on the device where they are."""
    if isinstance(part.content, bytes):
        return torch.frombuffer(bytearray(part.content), dtype=torch.uint8)
    values = part.content.detach().contiguous().reshape(-1).view(torch.uint8)
    assert values.numel() == part.length, "the values are those that were planned"
    return values


class _Written(NamedTuple):
    """A chunk that has been written."""

    offset: int
    length: int
    crc32: int
    stretches: list[tuple[int, int, int]]
    """End in the file, length and CRC-32 of what lies between the requested bytes."""


@dataclass
class _File:
    """A file that several threads write and read."""

    path: Path
    ends: Sequence[int]
    read_back: float
    written: list[_Written] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.descriptor, self.direct = _open(self.path, self.ends[-1])
        self._unread: deque[_Written] = deque()
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()

    def write(self, pool: ThreadPoolExecutor, pieces: Iterable[Chunk]) -> None:
        """Writes every chunk."""
        # Chunks that wait for a thread keep the tensors alive of which they are part.
        room = Semaphore(2 * THREADS)
        running: deque[Future[None]] = deque()
        try:
            for chunk in pieces:
                room.acquire()
                running.append(future := pool.submit(self._write_and_read, chunk))
                future.add_done_callback(lambda _: room.release())
                while running and running[0].done():
                    running.popleft().result()
            while running:
                running.popleft().result()
        finally:
            # After a failure nothing more begins.
            for future in running:
                future.cancel()

    def flush(self) -> None:
        """Cuts the file to its length and flushes it to the disk."""
        os.ftruncate(self.descriptor, self.ends[-1])
        os.fsync(self.descriptor)
        if not self.direct:
            # What the page cache still holds would not be read from the disk.
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def verify_rest(self, pool: ThreadPoolExecutor) -> None:
        """Reads back what has not been yet."""
        list(pool.map(self._read_back, self._unread))

    def sums(self) -> dict[int, int]:
        """Returns the CRC-32 from the beginning to each of the requested bytes."""
        found, total, wanted = {}, 0, set(self.ends)
        for chunk in sorted(self.written):
            for end, length, crc32 in chunk.stretches:
                total = combined(total, crc32, length)
                if end in wanted:
                    found[end] = total
        return found

    def _write_and_read(self, chunk: Chunk) -> None:
        """Writes a chunk, and reads one back that was written before."""
        buffer = self._buffer()
        view = memoryview(buffer)
        for place, values in chunk.sources:
            copy(values, view[place : place + values.numel()])
        written = self._summed(chunk, view)
        # Past the page cache only whole pages can be written. The file is cut to its length in the end.
        padded = -(-chunk.length // PAGE_BYTES) * PAGE_BYTES if self.direct else chunk.length
        view[chunk.length : padded] = bytes(padded - chunk.length)
        done = 0
        while done < padded:
            done += os.pwrite(self.descriptor, view[done:padded], chunk.offset + done)
        self._buffers.put(buffer)
        self.written.append(written)
        if self._wants(written):
            self._unread.append(written)
            if self.direct and len(self._unread) > LAG_CHUNKS:
                self._read_back(self._unread.popleft())

    def _wants(self, written: _Written) -> bool:
        """Returns whether a chunk is to be read back."""
        index = written.offset // CHUNK_BYTES
        is_at_an_end = not index or written.offset + written.length == self.ends[-1]
        due = int((index + 1) * self.read_back) > int(index * self.read_back)
        return self.read_back > 0 and (is_at_an_end or due)

    def _summed(self, chunk: Chunk, view: memoryview) -> _Written:
        """Returns the checksums of a chunk, of each stretch between requested bytes and of all of it."""
        stretches, begin, whole = [], 0, 0
        first = bisect_right(self.ends, chunk.offset)
        for end in [*self.ends[first : bisect_right(self.ends, chunk.offset + chunk.length - 1)], None]:
            stop = chunk.length if end is None else end - chunk.offset
            crc32 = zlib.crc32(view[begin:stop])
            stretches.append((chunk.offset + stop, stop - begin, crc32))
            whole, begin = combined(whole, crc32, stop - begin), stop
        return _Written(chunk.offset, chunk.length, whole, stretches)

    def _read_back(self, written: _Written) -> None:
        """Raises CheckpointError unless the disk has what was written."""
        buffer = self._buffer()
        view = memoryview(buffer)
        done = 0
        while done < written.length:
            count = os.preadv(self.descriptor, [view[done:]], written.offset + done)
            if not count:
                raise CheckpointError(
                    f"{self.path} is truncated: it reads back up to byte {written.offset + done} of {self.ends[-1]} "
                    f"that were written; {LOST}"
                )
            done += count
        crc32 = zlib.crc32(view[: written.length])
        self._buffers.put(buffer)
        if crc32 != written.crc32:
            raise CheckpointError(
                f"{self.path} is damaged: bytes {written.offset} to {written.offset + written.length} read back with "
                f"CRC-32 {crc32:08x}, written was {written.crc32:08x}; {LOST}"
            )

    def _buffer(self) -> mmap.mmap:
        """Returns a buffer at a page's beginning: one that is free, or another."""
        try:
            return self._buffers.get_nowait()
        except Empty:
            return mmap.mmap(-1, CHUNK_BYTES)


def copy(values: Tensor, place: memoryview) -> None:
    """Copies bytes to `place`, on this thread only."""
    target = np.frombuffer(place, dtype=np.uint8)
    if values.is_cuda:
        torch.from_numpy(target).copy_(values)
    else:
        # Not torch's copy, which would start threads of its own for each of these threads; and not `Tensor.numpy`,
        # after which the tensor's memory cannot be given back while its owner sleeps.
        np.copyto(target, np.from_dlpack(values))


def _open(path: Path, length: int) -> tuple[int, bool]:
    """Returns the descriptor of a file that has its room on the disk, and whether it is written past the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    descriptor = None
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
        # Some file systems accept the flag and then refuse to write.
        os.pwrite(descriptor, mmap.mmap(-1, PAGE_BYTES), 0)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666), False
    try:
        os.posix_fallocate(descriptor, 0, length)
    except OSError as error:
        # Of a file system that cannot, glibc says that it is invalid past the page cache.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
    return descriptor, True
