"""Copies and checksums of many boxes in a few launches, on a GPU (Triton).

A Python loop of `copy_` over the boxes of a large model takes five times as long as the bytes do. Here the boxes become
a table on the device, cut into tiles of about equal size; one program works on one tile.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and a constant is what it stands for.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Box
from rlframe.weight_sync.digest import BITS, _distinct, keys, twin_differs
from rlframe.weight_sync.layout import Layout

TILE = 8192
"""Words of a copy tile: 64 KiB, so that a tile outlasts the latency of a link."""
MAX_COLS = 1024
"""Columns of a checksum tile at most."""
DIGEST_ROWS = 16
"""Rows of a checksum tile."""
ROUNDS = 2
"""Rounds of the checksum's mixing; another number is for measuring only."""
WIDTHS = (16, 8, 4, 2, 1)
"""Bytes that a copy can move as one piece, by alignment, the widest first."""
FORMATS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Triton's names of the number formats."""


class Pair(NamedTuple):
    """One strided block and where it goes. Strides count elements."""

    source: int
    """Address of its first element, which this device can read."""
    target: int
    """Address, on this device."""
    rows: int
    cols: int
    source_row_stride: int
    source_col_stride: int
    target_row_stride: int
    target_col_stride: int


@triton.jit
def _copy_words(table, tiles, ROWS: tl.constexpr, COLS: tl.constexpr, BYTES: tl.constexpr):
    """Blocks whose columns are contiguous on both sides, moved as words of the same bits."""
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
        # Two words of 8 bytes move as one piece when the compiler knows that they start at 16.
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        source_stride, target_stride = tl.multiple_of(source_stride, 2), tl.multiple_of(target_stride, 2)
        cols = tl.multiple_of(cols, 2)
    row = (tl.load(tile + 1) + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = (tl.multiple_of(tl.load(tile + 2), COLS) + tl.arange(0, COLS)).to(tl.int64)[None, :]
    inside = (row < rows) & (col < cols)
    tl.store(target + row * target_stride + col, tl.load(source + row * source_stride + col, mask=inside), mask=inside)


@triton.jit
def _copy_elements(table, tiles, ROWS: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr):
    """Any strides, any two number formats."""
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


@triton.jit
def _digest(
    table, tiles, row_keys, col_keys, totals, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGNED: tl.constexpr,
    HELD: tl.constexpr, SEEN: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Adds each tile's share to the total of its slot; see `digest` for the formula."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 3
    box = table + tl.load(tile).to(tl.int64) * 8
    data = tl.load(box).to(tl.pointer_type(HELD))
    first_row, rows, first_col, cols = tl.load(box + 1), tl.load(box + 2), tl.load(box + 3), tl.load(box + 4)
    row_stride, col_stride = tl.load(box + 5), tl.load(box + 6)
    row = tl.load(tile + 1).to(tl.int64)
    col = tl.multiple_of(tl.load(tile + 2), COLS).to(tl.int64) + tl.arange(0, COLS)
    if ALIGNED:
        data, row_stride, cols, col_stride = (
            tl.multiple_of(data, 16), tl.multiple_of(row_stride, 8), tl.multiple_of(cols, 8), 1
        )  # fmt: skip
    # Outside, weights are 0, and so is what is added.
    col_key = col_keys + (first_col + col) * 2
    weights = tl.load(col_key, mask=col < cols, other=0)
    mixers = tl.load(col_key + 1, mask=col < cols, other=0)
    multipliers, offsets = mixers.to(tl.uint32), (mixers >> 32).to(tl.uint32)
    total = tl.zeros([COLS], dtype=tl.int64)
    for _ in tl.static_range(ROWS):
        inside = col < tl.where(row < rows, cols, 0)
        value = tl.load(data + row * row_stride + col * col_stride, mask=inside, other=0)
        row_key = row_keys + (first_row + row) * 2
        row_weight = tl.load(row_key, mask=row < rows, other=0)
        row_mixer = tl.load(row_key + 1, mask=row < rows, other=0)
        if SEEN.primitive_bitwidth == 16:
            bits = value.to(SEEN).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            bits = value.to(SEEN).to(tl.uint32, bitcast=True)
        if ROUNDS >= 1:
            bits = (bits ^ offsets) * row_mixer.to(tl.uint32) + (row_mixer >> 32).to(tl.uint32)
            bits = bits ^ (bits >> 16)
        if ROUNDS >= 2:
            bits = bits * multipliers + offsets
            bits = bits ^ (bits >> 16)
        total += bits.to(tl.int64) * row_weight
        row += 1
    tl.atomic_add(totals + tl.load(box + 7), tl.sum(total * weights, 0), sem="relaxed")


class CopyTable:
    """Copies between addresses, ready to run. The memory behind the addresses must stay where it is."""

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
            lanes: number of the link each pair is read over; tiles of all lanes take turns, so that no link waits.
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
    """A kernel with its tables on the device, compiled before its first real work."""

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
        # A box without rows: compiles, and touches nothing.
        nothing = (torch.zeros_like(self._table[:1]), torch.zeros_like(self._tiles[:1]))
        self._run(*nothing)

    def __call__(self) -> None:
        self._run(self._table, self._tiles)

    def _run(self, table: Tensor, tiles: Tensor) -> None:
        self._kernel[(len(tiles),)](table, tiles, *self._arguments, **self._options)


@dataclass(frozen=True, slots=True)
class _Slots:
    """Whose sum each slot of the totals is."""

    names: list[str]
    """Slot i < len(names) is the share of names[i]."""
    twins: list[tuple[str, str, int, int]]
    """(tensor, parameter, slot of the first copy of a region, slot of the second)."""
    count: int


class DigestTable:
    """This rank's checksum shares on a GPU; see `digest.digest` for what they are."""

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        names: Sequence[str],
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        seed: int = 0,
    ):
        """
        Args:
            names: tensors in the order of the shares.
            dtypes: format to see each tensor in; as held when absent.
            seed: of the keys.

        Raises:
            WeightSyncFailed: a number format without a digest.
        """
        device = next(iter(parameters.values())).device
        # The tables hold addresses: whoever holds them keeps the memory.
        self._parameters = parameters
        self._slots, rows = _digest_rows(layout, parameters, names, dtypes or {})
        self._totals = torch.zeros(self._slots.count, dtype=torch.int64, device=device)
        highest = [(box.row + box.rows, box.col + box.cols) for boxes in layout.boxes.values() for box in boxes]
        self._keys = [
            _interleaved(axis, max((end[index] for end in highest), default=1), seed, device)
            for index, axis in enumerate(("row", "col"))
        ]
        self._launches: list[_Launch] = []
        for (held, seen), table in rows.items():
            self._add(np.array(table, dtype=np.int64), held, seen, device)

    def _add(self, table: NDArray, held: torch.dtype, seen: torch.dtype, device: torch.device) -> None:
        eighths = (table[:, 4] | np.where(table[:, 2] > 1, table[:, 5], 0)) % 8 == 0
        unit = (table[:, 6] == 1) & (table[:, 0] % 16 == 0) & eighths
        widths = np.clip(_power_of_two(table[:, 4]), 128, MAX_COLS)
        for aligned in (True, False):
            for cols in np.unique(widths[unit == aligned]):
                part = np.ascontiguousarray(table[(unit == aligned) & (widths == cols)])
                tiles = _tiles(part[:, 2], part[:, 4], DIGEST_ROWS, int(cols), np.zeros(len(part), dtype=np.int64))
                options = {"ROWS": DIGEST_ROWS, "COLS": int(cols), "ALIGNED": aligned, "num_warps": 4}
                options |= {"HELD": FORMATS[held], "SEEN": FORMATS[seen], "ROUNDS": ROUNDS}
                arguments = (*self._keys, self._totals)
                self._launches.append(_Launch(_digest, part, tiles, device, arguments, options))

    def shares(self) -> NDArray[np.uint64]:
        """[N] this rank's share of each tensor's digest, 0 where it holds nothing.

        Raises:
            WeightSyncFailed: a region held twice (a tied weight) with two contents.
        """
        self._totals.zero_()
        for launch in self._launches:
            launch()
        totals = self._totals.cpu().numpy().view(np.uint64)
        for tensor, parameter, first, second in self._slots.twins:
            if totals[first] != totals[second]:
                raise WeightSyncFailed(twin_differs(tensor, parameter))
        return totals[: len(self._slots.names)].copy()


def _interleaved(axis: str, count: int, seed: int, device: torch.device) -> Tensor:
    """[count, 2] int64 weight and mixer of each index, side by side."""
    found = keys(axis, count, seed)
    pairs = np.stack([found.weights[:count], found.mixers[:count]], axis=1)
    return torch.from_numpy(pairs.view(np.int64)).to(device)


def _digest_rows(
    layout: Layout, parameters: Mapping[str, Tensor], names: Sequence[str], dtypes: Mapping[str, torch.dtype]
) -> tuple[_Slots, dict[tuple[torch.dtype, torch.dtype], list[tuple[int, ...]]]]:
    """(slots, table rows by (format held, format seen)): address, row, rows, col, cols, strides, slot."""
    rows: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, ...]]] = {}
    twins: list[tuple[str, str, int, int]] = []
    count = len(names)

    def add(box: Box, slot: int) -> None:
        parameter = parameters[box.parameter]
        seen = dtypes.get(box.tensor, parameter.dtype)
        if seen not in BITS:
            raise WeightSyncFailed(f"{box.tensor} is held as {seen}; digests know {', '.join(map(str, BITS))}")
        address = parameter.data_ptr() + box.offset * parameter.dtype.itemsize
        row = (address, box.row, box.rows, box.col, box.cols, box.row_stride, box.col_stride, slot)
        rows.setdefault((parameter.dtype, seen), []).append(row)

    for index, name in enumerate(names):
        first, others = _distinct(layout.boxes.get(name, ()))
        for box in first:
            add(box, index)
        for twin in others:
            original = next(box for box in first if box.region == twin.region)
            twins.append((name, twin.parameter, count, count + 1))
            add(original, count)
            add(twin, count + 1)
            count += 2
    return _Slots(list(names), twins, count), rows


def _word_bytes(table: NDArray, size: int) -> NDArray:
    """[n] widest piece in which each pair can move; 0 where its columns are not contiguous."""
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
    """The pairs counted in words instead of elements; what is contiguous on both sides becomes one row."""
    table = table.copy()
    table[:, [3, 4, 6]] = table[:, [3, 4, 6]] * size // word
    flat = (table[:, 4] == table[:, 3]) & (table[:, 6] == table[:, 3])
    table[flat, 3] *= table[flat, 2]
    table[flat, 2] = 1
    return table


def _tiled(table: NDArray, lanes: NDArray) -> list[tuple[int, NDArray, NDArray]]:
    """(columns of a tile, boxes, tiles) by width of the boxes."""
    widths = np.clip(_power_of_two(table[:, 3]), 16, TILE)
    found = []
    for cols in np.unique(widths):
        part = np.ascontiguousarray(table[widths == cols])
        tiles = _tiles(part[:, 2], part[:, 3], max(1, TILE // int(cols)), int(cols), lanes[widths == cols])
        found.append((int(cols), part, tiles))
    return found


def _tiles(rows: NDArray, cols: NDArray, tile_rows: int, tile_cols: int, lanes: NDArray) -> NDArray:
    """[tiles, 3] int32 (box, first row, first column), those of different lanes taking turns."""
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
    """[n] the smallest power of two that is not below each value."""
    return (2 ** np.ceil(np.log2(np.maximum(values, 1)))).astype(np.int64)
