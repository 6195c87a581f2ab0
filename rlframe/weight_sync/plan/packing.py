"""Packed buffers: the strided blocks of each message, and the copies into and out of it."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlframe.weight_sync.layout.boxes import window
from rlframe.weight_sync.plan.copies import Copies, Place

ALIGNMENT = 16
"""Alignment in bytes of pieces in a message, so that any number format can be read there."""


class Piece(NamedTuple):
    """A strided block of a parameter, and its contiguous position in a message."""

    parameter: str
    offset: int
    """Elements from the parameter's first element."""
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    start: int
    """Bytes from the message's first byte."""
    dtype: torch.dtype
    """Number format in the message: the engine's."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the message."""
        return self.rows * self.cols * self.dtype.itemsize


Message = list[Piece]


def capacity_of(chunk_bytes: int, num_peers: int) -> int:
    """Returns the length of messages of which buffers of `chunk_bytes` have one for each peer; the least length for
    more peers than that."""
    return max(ALIGNMENT, chunk_bytes // num_peers // ALIGNMENT * ALIGNMENT)


def cut(
    copies: Copies, side: Literal["read", "write"], dtypes: Mapping[str, torch.dtype], capacity: int
) -> list[Message]:
    """Returns the copies in messages of at most `capacity` bytes.

    The division depends on the sizes only. Both ends of a pair of ranks, each with its own side of the same copies,
    thus make messages that fit.
    """
    cutter = _Cutter(capacity)
    for copy in copies:
        cutter.add(copy.read if side == "read" else copy.write, copy.rows, copy.cols, dtypes[copy.tensors[0]])
    return cutter.messages


class _Cutter:
    """Fills messages one after the other: as many whole rows of a copy as fit into the rest of the message, or into a
    new one; parts of rows if not even one fits."""

    def __init__(self, capacity: int):
        self.messages: list[Message] = []
        self._capacity = self._used = capacity

    def add(self, place: Place, rows: int, cols: int, dtype: torch.dtype) -> None:
        row_bytes = cols * dtype.itemsize
        if row_bytes > self._capacity:
            step = self._capacity // dtype.itemsize
            for row, col in itertools.product(range(rows), range(0, cols, step)):
                self._put(place, (row, 1), (col, min(step, cols - col)), dtype)
            return
        row = 0
        while row < rows:
            room = self._capacity - self._start
            count = min(rows - row, (room if room >= row_bytes else self._capacity) // row_bytes)
            self._put(place, (row, count), (0, cols), dtype)
            row += count

    @property
    def _start(self) -> int:
        """Start of the next piece in the open message."""
        return -(-self._used // ALIGNMENT) * ALIGNMENT

    def _put(self, place: Place, rows: tuple[int, int], cols: tuple[int, int], dtype: torch.dtype) -> None:
        """Puts a block, given by first and number of its rows and columns, into the messages."""
        start, size = self._start, rows[1] * cols[1] * dtype.itemsize
        if start + size > self._capacity:
            self.messages.append([])
            start = 0
        offset = place.offset + rows[0] * place.row_stride + cols[0] * place.col_stride
        strides = place.row_stride, place.col_stride
        self.messages[-1].append(Piece(place.parameter, offset, rows[1], cols[1], *strides, start, dtype))
        self._used = start + size


def message_bytes(message: Message) -> int:
    """Returns the length of a message."""
    return message[-1].start + message[-1].num_bytes


class Packing:
    """Moves the pieces of messages between parameters and buffers, all in one go."""

    def __init__(
        self, parameters: Mapping[str, Tensor], messages: Sequence[tuple[Message, Tensor]], *, into_buffers: bool
    ):
        """Looks up all addresses.

        Args:
            messages: each with its buffer, [bytes] uint8.
            into_buffers: whether to pack; otherwise it unpacks.
        """
        self._views: list[tuple[Tensor, Tensor]] = []
        self._tables = []
        pairs: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, ...]]] = defaultdict(list)
        for message, buffer in messages:
            for piece in message:
                parameter = parameters[piece.parameter]
                if buffer.is_cuda:
                    formats = (parameter.dtype, piece.dtype) if into_buffers else (piece.dtype, parameter.dtype)
                    pairs[formats].append(_pair(parameter, piece, buffer, into_buffers=into_buffers))
                    continue
                strides = (piece.row_stride, piece.col_stride)
                inside = window(parameter, piece.offset, (piece.rows, piece.cols), strides)
                packed = buffer[piece.start : piece.start + piece.num_bytes].view(piece.dtype)
                packed = packed.view(piece.rows, piece.cols)
                self._views.append((packed, inside) if into_buffers else (inside, packed))
        if pairs:
            # Triton exists only with CUDA.
            from rlframe.weight_sync.plan.copy_kernels import CopyTable

            device = next(buffer.device for _, buffer in messages)
            self._tables = [CopyTable(mine, *formats, device) for formats, mine in pairs.items()]

    def run(self) -> None:
        """Moves the pieces; on CUDA on the current stream."""
        for target, source in self._views:
            target.copy_(source)
        for table in self._tables:
            table.run()


def _pair(parameter: Tensor, piece: Piece, buffer: Tensor, *, into_buffers: bool) -> tuple[int, ...]:
    """Returns a row of the kernel's table: addresses of source and target, rows, columns, strides of both."""
    place = Place(piece.parameter, piece.offset, piece.row_stride, piece.col_stride)
    inside = parameter.data_ptr() + place.offset * parameter.dtype.itemsize
    packed = buffer.data_ptr() + piece.start
    strides, dense = (piece.row_stride, piece.col_stride), (piece.cols, 1)
    if into_buffers:
        return (inside, packed, piece.rows, piece.cols, *strides, *dense)
    return (packed, inside, piece.rows, piece.cols, *dense, *strides)
