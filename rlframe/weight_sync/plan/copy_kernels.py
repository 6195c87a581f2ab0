"""Copies of many boxes in a few launches, on a GPU (Triton).

A Python loop of `copy_` over the boxes of a large model takes five times as long as the transfer of the bytes. Here the
boxes become a table on the device, split into tiles of about equal size; one program copies one tile.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

TILE = 8192
"""Words of a copy tile: 64 KiB, so that a tile outlasts the latency of a link."""
WIDTHS = (16, 8, 4, 2, 1)
"""Bytes that a copy can move as one piece, by alignment, the widest first."""
FORMATS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.uint8,
}
"""Triton's names of the number formats. Numbers of 8 bits are never cast, so that their bits will do."""


class Pair(NamedTuple):
    """A strided block and its target. Strides count elements."""

    source: int
    """Address of the source's first element, which this device can read."""
    target: int
    """Address of the target on this device."""
    rows: int
    cols: int
    source_row_stride: int
    source_col_stride: int
    target_row_stride: int
    target_col_stride: int


@triton.jit
def _copy_words(table, tiles, ROWS: tl.constexpr, COLS: tl.constexpr, BYTES: tl.constexpr):
    """Copies blocks whose columns are contiguous on both sides, as words of the same bits."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    box = table + tl.load(tile).to(tl.int64) * 8
    if BYTES >= 8:
        source = tl.load(box).to(tl.pointer_type(tl.int64))
        target = tl.load(box + 1).to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        source = tl.load(box).to(tl.pointer_type(tl.int32))
        target = tl.load(box + 1).to(tl.pointer_type(tl.int32))
    elif BYTES == 2:
        source = tl.load(box).to(tl.pointer_type(tl.int16))
        target = tl.load(box + 1).to(tl.pointer_type(tl.int16))
    else:
        source = tl.load(box).to(tl.pointer_type(tl.int8))
        target = tl.load(box + 1).to(tl.pointer_type(tl.int8))
    rows, cols = tl.load(box + 2), tl.load(box + 3)
    source_stride, target_stride = tl.load(box + 4), tl.load(box + 6)
    if BYTES == 16:
        # Two words of 8 bytes move as one piece if the compiler knows that they start at a multiple of 16.
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        source_stride, target_stride = tl.multiple_of(source_stride, 2), tl.multiple_of(target_stride, 2)
        cols = tl.multiple_of(cols, 2)
    row = (tl.load(tile + 1) + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.multiple_of(tl.load(tile + 2), COLS) + tl.arange(0, COLS)).to(tl.int64)[None, :]
    inside = (row < rows) & (col < cols)
    tl.store(target + row * target_stride + col, tl.load(source + row * source_stride + col, mask=inside), mask=inside)


@triton.jit
def _copy_elements(table, tiles, ROWS: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr):
    """Copies blocks of any strides and any two number formats."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    box = table + tl.load(tile).to(tl.int64) * 8
    source = tl.load(box).to(tl.pointer_type(READ))
    target = tl.load(box + 1).to(tl.pointer_type(WRITTEN))
    rows, cols = tl.load(box + 2), tl.load(box + 3)
    row = (tl.load(tile + 1) + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.load(tile + 2) + tl.arange(0, COLS)).to(tl.int64)[None, :]
    inside = (row < rows) & (col < cols)
    value = tl.load(source + row * tl.load(box + 4) + col * tl.load(box + 5), mask=inside)
    tl.store(target + row * tl.load(box + 6) + col * tl.load(box + 7), value.to(WRITTEN), mask=inside)


class CopyTable:
    """Copies between addresses, ready to run. The memory at the addresses must not move."""

    def __init__(
        self,
        pairs: Sequence[tuple[int, ...]] | NDArray,
        source_dtype: torch.dtype,
        target_dtype: torch.dtype,
        device: torch.device,
        *,
        lanes: Sequence[int] | NDArray | None = None,
    ):
        """
        Args:
            pairs: each a `Pair`.
            lanes: index of the link over which each pair is read; tiles of all lanes alternate, so that no link waits.
        """
        self._launches: list[_Launch] = []
        table = np.array(pairs, dtype=np.int64).reshape(-1, 8)
        order = np.zeros(len(table), dtype=np.int64) if lanes is None else np.asarray(lanes, dtype=np.int64)
        size = target_dtype.itemsize
        words = _word_bytes(table, size) if source_dtype == target_dtype else np.zeros(len(table), dtype=np.int64)
        for width in np.unique(words):
            part, lane = table[words == width], order[words == width]
            if width:
                part = _as_words(part, size, min(int(width), 8))
            for cols, tiled, tiles in _tiled(part, lane):
                self._add(int(width), cols, tiled, tiles, (source_dtype, target_dtype), device)

    def _add(
        self, width: int, cols: int, table: NDArray, tiles: NDArray, dtypes: tuple[torch.dtype, ...], device: Any
    ) -> None:
        options = {"ROWS": max(1, TILE // cols), "COLS": cols, "num_warps": 8}
        if width:
            kernel, options = _copy_words, options | {"BYTES": width}
        else:
            read, written = (FORMATS[dtype] for dtype in dtypes)
            kernel, options = _copy_elements, options | {"READ": read, "WRITTEN": written}
        self._launches.append(_Launch(kernel, table, tiles, device, (), options))

    def run(self) -> None:
        """Launches all copies on the current stream."""
        for launch in self._launches:
            launch()


class _Launch:
    """A kernel with its tables on the device, compiled before its first real use."""

    def __init__(
        self,
        kernel: Any,
        table: NDArray,
        tiles: NDArray,
        device: torch.device,
        arguments: tuple[Tensor, ...],
        options: Mapping[str, Any],
    ):
        self._kernel, self._arguments, self._options = kernel, arguments, options
        self._table, self._tiles = (torch.from_numpy(array).to(device) for array in (table, tiles))
        # A box without rows: compiles the kernel, and touches nothing.
        nothing = (torch.zeros_like(self._table[:1]), torch.zeros_like(self._tiles[:1]))
        self._run(*nothing)

    def __call__(self) -> None:
        self._run(self._table, self._tiles)

    def _run(self, table: Tensor, tiles: Tensor) -> None:
        self._kernel[(len(tiles),)](table, tiles, *self._arguments, **self._options)


def _word_bytes(table: NDArray, size: int) -> NDArray:
    """Returns [n] the widest piece in which each pair can move. 0 if its columns are not contiguous."""
    bits = table[:, 0] | table[:, 1] | (table[:, 3] * size)
    several = table[:, 2] > 1
    bits = bits | np.where(several, table[:, 4] * size, 0) | np.where(several, table[:, 6] * size, 0)
    widths = np.full(len(table), size)
    for width in reversed(WIDTHS):
        if width >= size:
            widths = np.where(bits % width == 0, width, widths)
    contiguous = ((table[:, 5] == 1) & (table[:, 7] == 1)) | (table[:, 3] == 1)
    return np.where(contiguous, widths, 0)


def _as_words(table: NDArray, size: int, word: int) -> NDArray:
    """Returns the pairs counted in words instead of elements. Pairs that are contiguous on both sides become one
    row."""
    table = table.copy()
    table[:, [3, 4, 6]] = table[:, [3, 4, 6]] * size // word
    flat = (table[:, 4] == table[:, 3]) & (table[:, 6] == table[:, 3])
    table[flat, 3] *= table[flat, 2]
    table[flat, 2] = 1
    return table


def _tiled(table: NDArray, lanes: NDArray) -> list[tuple[int, NDArray, NDArray]]:
    """Returns (columns of a tile, boxes, tiles) by width of the boxes."""
    widths = np.clip(_power_of_two(table[:, 3]), 16, TILE)
    found = []
    for cols in np.unique(widths):
        part = np.ascontiguousarray(table[widths == cols])
        tiles = _tiles(part[:, 2], part[:, 3], max(1, TILE // int(cols)), int(cols), lanes[widths == cols])
        found.append((int(cols), part, tiles))
    return found


def _tiles(rows: NDArray, cols: NDArray, tile_rows: int, tile_cols: int, lanes: NDArray) -> NDArray:
    """Returns [tiles, 3] int32 (box, first row, first column), with alternating lanes."""
    down, across = -(-rows // tile_rows), -(-cols // tile_cols)
    counts = down * across
    box = np.repeat(np.arange(len(rows)), counts)
    index = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([box, index // across[box] * tile_rows, index % across[box] * tile_cols], axis=1)
    lane = lanes[box]
    place = np.zeros(len(box))
    for value in np.unique(lane):
        mine = lane == value
        place[mine] = np.arange(mine.sum()) / mine.sum()
    return np.ascontiguousarray(tiles[np.argsort(place, kind="stable")].astype(np.int32))


def _power_of_two(values: NDArray) -> NDArray:
    """Returns [n] the smallest power of two that is not below each value."""
    return (2 ** np.ceil(np.log2(np.maximum(values, 1)))).astype(np.int64)
