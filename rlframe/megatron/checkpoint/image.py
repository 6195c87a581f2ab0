"""The image of a rank's file: every byte that torch would write, but for the values of tensors, which stay where they
are until they are written.

torch's `FileSystemWriter` writes it, into a stream that keeps the bytes of headers and the places of values
(`torch.serialization.skip_data`). So the format is torch's, and the values need not pass through torch.save on one
thread, which copies them, sums them and holds Python's lock meanwhile.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

Items = Sequence[tuple[WriteItem, Any]]
"""Data to write: tensors on any device, or `io.BytesIO` for other objects."""


class Part(NamedTuple):
    """Consecutive bytes of a file."""

    offset: int
    length: int
    """Number of bytes."""
    content: bytes | Tensor
    """The bytes, or the tensor whose values they are, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """The content of a file before it is written."""

    name: str
    """Name of the file."""
    parts: list[Part]
    """Parts in their order, without gaps."""
    results: list[WriteResult]
    """Position of each item, as torch finds it again."""

    @property
    def length(self) -> int:
        """Number of bytes of the file."""
        return self.parts[-1].offset + self.parts[-1].length


def image(items: Items, *, folder: Path, rank: int) -> Image:
    """Returns the image of the file of `rank` in `folder`. Touches no values, and writes nothing."""
    # One file on one thread, this one; it asks for the values of an item when it has come to it.
    writer = FileSystemWriter(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = writer.transforms = streams = _Streams()
    # A rank's file is named after its place among the plans of all.
    plans = [SavePlan(items=[])] * rank + [SavePlan(items=[item for item, _ in items])]
    plan = writer.prepare_global_plan(plans)[rank]
    with torch.serialization.skip_data():
        results = writer.write_data(plan, _Hollow(items, streams)).value()
    assert streams.stream is not None and streams.name
    return Image(name=streams.name, parts=streams.stream.parts, results=results)


class _Stream(io.RawIOBase):
    """Keeps what is written to it, and the tensor that belongs where torch skips the values of one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self.next: Tensor | None = None
        """The tensor whose values torch skips next."""
        self._position = 0

    def write(self, data: Any) -> int:
        """Keeps `data`."""
        content = bytes(data)
        self._add(len(content), content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Notes that torch skips the values of the next tensor."""
        assert whence == os.SEEK_CUR and self.next is not None and offset == self.next.nbytes
        self._add(offset, self.next)
        return self._position

    def close(self) -> None:
        """Does nothing: torch closes it after each entry."""

    def tell(self) -> int:
        """Returns the number of bytes so far."""
        return self._position

    def _add(self, length: int, content: bytes | Tensor) -> None:
        if length:
            self.parts.append(Part(self._position, length, content))
            self._position += length


class _Streams(FileSystem):
    """Opens streams for torch's writer instead of files: the only one. In the place of its transformations too, which
    wrap a stream in one that cannot skip."""

    def __init__(self) -> None:
        self.name = ""
        self.stream: _Stream | None = None

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens the stream."""
        assert mode == "wb" and self.stream is None, "one file, which is written"
        self.name, self.stream = Path(path).name, _Stream()
        yield self.stream

    def transform_save_stream(self, write_item: WriteItem, raw_stream: io.IOBase) -> tuple[io.IOBase, list[Any]]:  # noqa: ARG002
        """Returns the stream as it is, and that nothing changes it."""
        return raw_stream, []

    def mkdir(self, path: str | PathLike[str]) -> None:
        """Creates nothing: the folder is there."""


class _Hollow(DefaultSavePlanner):
    """Supplies torch's writer with tensors that have the form of those to write, and no values."""

    def __init__(self, items: Items, streams: _Streams):
        super().__init__()
        self._streams = streams
        self._values: dict[MetadataIndex, Any] = {item.index: value for item, value in items}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Returns the bytes of an object, or a tensor over memory that is never touched."""
        value = self._values[write_item.index]
        if write_item.type is WriteItemType.BYTE_IO:
            return value
        assert self._streams.stream is not None
        self._streams.stream.next = value
        # Not torch.empty, which fills what it returns where torch is deterministic.
        return torch.empty(0, dtype=value.dtype).set_(torch.UntypedStorage(value.nbytes)).view(value.shape)
