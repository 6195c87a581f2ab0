"""A file is written by threads a chunk at a time, byte for byte, and what the disk has is compared."""

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.megatron.checkpoint import crc, writer
from rlframe.megatron.checkpoint.image import Part
from rlframe.utils.errors import CheckpointError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of kilobytes has many chunks, some of which are read back while others are written."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(writer, "LAG_CHUNKS", 3)


def content() -> tuple[list[Part], list[int], bytes]:
    """Parts of all lengths: shorter than a chunk, longer than several, and values of two bytes that begin anywhere.
    Where each ends, and all of it."""
    torch.manual_seed(0)
    parts, ends, whole = [], [], b""
    for length in (1, 5, 4090, 4096, 20_002, 3, 8192, 777):
        values = torch.randint(0, 255, (length,), dtype=torch.uint8)
        if length % 2:
            held: Any = values.numpy().tobytes()
        else:
            # Every second column of a matrix, which is no stretch of memory.
            held = values.view(torch.int16).repeat(2, 1).t()[:, 0]
        parts.append(Part(len(whole), length, held))
        whole += values.numpy().tobytes()
        ends.append(len(whole))
    return parts, ends, whole


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("read_back", [0.0, 0.3, 1.0])
def test_the_file_is_its_parts_and_has_the_checksum_of_each_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, read_back: float
) -> None:
    if not direct:
        without_direct(monkeypatch)
    parts, ends, whole = content()
    (tmp_path / "file").write_bytes(bytes(100_000))
    report = writer.write_file(tmp_path / "file", parts, ends=ends, read_back=read_back)
    assert (tmp_path / "file").read_bytes() == whole
    # By zlib, in one piece.
    assert report.crc32_at == {end: zlib.crc32(whole[:end]) for end in ends}


def test_a_tensor_that_was_written_can_still_leave_its_memory(tmp_path: Path) -> None:
    values = torch.arange(4096, dtype=torch.float32)
    expected = bytes(values.untyped_storage())
    writer.write_file(tmp_path / "file", [Part(0, len(expected), values)], ends=[len(expected)], read_back=1.0)
    assert (tmp_path / "file").read_bytes() == expected
    # As a policy does that goes to sleep.
    values.untyped_storage().resize_(0)


def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system does that has no writes past the page cache."""
    real = os.open

    def opened(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("place", [0, 20_000, -1], ids=["beginning", "middle", "end"])
def test_what_the_disk_has_otherwise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    parts, ends, whole = content()
    position = place % len(whole)
    real = os.preadv

    def rotten(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        if offset <= position < offset + count:
            buffers[0][position - offset] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", rotten)
    with pytest.raises(CheckpointError, match="file is damaged: bytes .* the disk or the network to it loses data"):
        writer.write_file(tmp_path / "file", parts, ends=ends, read_back=1.0)
    # A fraction has the beginning and the end, and the rest by chance.
    if place != 20_000:
        with pytest.raises(CheckpointError, match="is damaged"):
            writer.write_file(tmp_path / "file", parts, ends=ends, read_back=0.01)
    writer.write_file(tmp_path / "file", parts, ends=ends, read_back=0.0)


def test_a_fraction_is_read_back_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, read = os.preadv, []

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(offset // 4096)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    parts = [Part(0, 41 * 4096, torch.zeros(41 * 4096, dtype=torch.uint8))]
    writer.write_file(tmp_path / "file", parts, ends=[41 * 4096], read_back=0.125)
    # Every eighth, the first and the last.
    assert sorted(read) == [0, 7, 15, 23, 31, 39, 40]


def test_a_file_is_flushed_before_the_last_of_it_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, done = os.fsync, []

    def flushed(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    parts, ends, whole = content()
    writer.write_file(tmp_path / "file", parts, ends=ends, read_back=1.0)
    assert done == [len(whole)]


def test_a_write_that_fails_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, ends, _ = content()
    real = os.pwrite

    def refused(descriptor: int, data: Any, offset: int) -> int:
        if offset == 2 * 4096:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refused)
    with pytest.raises(OSError, match="Input/output error"):
        writer.write_file(tmp_path / "file", parts, ends=ends, read_back=1.0)


def test_checksums_of_stretches_combine() -> None:
    data = bytes(range(256)) * 40
    for cut in (0, 1, 7, 4096, len(data)):
        first, second = zlib.crc32(data[:cut]), zlib.crc32(data[cut:])
        assert crc.combined(first, second, len(data) - cut) == zlib.crc32(data)
