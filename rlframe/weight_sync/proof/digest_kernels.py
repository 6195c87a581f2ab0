"""The checksum of many boxes in a few launches, on a GPU (Triton); see `digest` for the formula.

A box is split into tiles. Each has a row of a table on the device with everything its program needs: one load, and then
the data. Tiles that lie wholly inside their box have a kernel without masks.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.proof.terms import (
    BITS,
    FIRST_FACTOR,
    SECOND_FACTOR,
    distinct,
    keys,
    twin_differs,
    word_elements,
)

BLOCK = 256
"""Words that a program mixes at a time."""
STEPS = 16
"""Number of blocks of a tile, one below the other."""
WARPS = 1
"""Warps of a program. With one, no thread waits for another."""
MAX_COLS, MIN_COLS = 256, 16
"""Words of a tile's row."""
FORMATS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.uint8,
}
"""Triton's names of the number formats. Numbers of 8 bits are never cast, so that their bits will do."""
COLUMNS = ("address", "row_stride", "col_stride", "row", "word", "rows", "words", "slot")
"""Columns of the table of tiles: its address, strides in elements, its first row and word in the tensor, the remaining
rows and words of the box from there, and the slot of its sum."""

_FIRST = tl.constexpr(FIRST_FACTOR)
_SECOND = tl.constexpr(SECOND_FACTOR)


@triton.jit
def _mix(word):
    """Mixes 64 bits by a bijection."""
    word = word * _FIRST
    word = word ^ (word >> 32)
    word = word * _SECOND
    return word ^ (word >> 32)


@triton.jit
def _word(data, inside, row_stride, UNIT: tl.constexpr, DIRECT: tl.constexpr, MASKED: tl.constexpr,
          HELD: tl.constexpr, SEEN: tl.constexpr, col_stride):  # fmt: skip
    """Returns the word at each place: loaded as it is, or composed of `UNIT` elements."""
    if DIRECT:
        if MASKED:
            return tl.load(data, mask=inside, other=0)
        return tl.load(data)
    word = tl.zeros(inside.shape, dtype=tl.uint64)
    for index in tl.static_range(UNIT):
        value = tl.load(data + index * col_stride, mask=inside, other=0).to(SEEN)
        if SEEN.primitive_bitwidth == 8:
            word |= value.to(tl.uint64) << (8 * index)
        elif SEEN.primitive_bitwidth == 16:
            word |= value.to(tl.uint16, bitcast=True).to(tl.uint64) << (16 * index)
        else:
            word |= value.to(tl.uint32, bitcast=True).to(tl.uint64) << (32 * index)
    return word


@triton.jit
def _digest(
    tiles, row_keys, col_keys, totals, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
    MASKED: tl.constexpr, DIRECT: tl.constexpr, UNIT: tl.constexpr, HELD: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Adds each tile's share to the total of its slot."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    row_stride, col_stride = tl.load(tile + 1), tl.load(tile + 2)
    first_row, first_word = tl.load(tile + 3), tl.load(tile + 4)
    rows, words = tl.load(tile + 5).to(tl.int32), tl.load(tile + 6).to(tl.int32)
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    if DIRECT:
        # Words of 8 bytes move two at a time if the compiler knows that they start at a multiple of 16.
        data = tl.multiple_of(tl.load(tile).to(tl.pointer_type(tl.uint64)), 16)
        stride, step = tl.multiple_of(row_stride // UNIT, 2), 1
        words = tl.multiple_of(words, 2)
    else:
        data = tl.load(tile).to(tl.pointer_type(HELD))
        stride, step = row_stride, col_stride * UNIT
    places = data + row[:, None].to(tl.int64) * stride + col[None, :] * step
    col_key = col_keys + (first_word + col) * 2
    row_key = row_keys + (first_row + row) * 2
    there = col < words
    # Outside, weights are 0, and so are the added terms.
    key = tl.load(col_key, mask=there, other=0)[None, :]
    weights = tl.load(col_key + 1, mask=there, other=0)[None, :]
    total = tl.zeros([ROWS, COLS], dtype=tl.uint64)
    for index in tl.static_range(STEPS):
        below = row + index * ROWS < rows
        inside = below[:, None] & there[None, :]
        word = _word(places, inside, row_stride, UNIT, DIRECT, MASKED, HELD, SEEN, col_stride)
        if MASKED:
            row_mixers, row_weights = tl.load(row_key, mask=below, other=0), tl.load(row_key + 1, mask=below, other=0)
        else:
            row_mixers, row_weights = tl.load(row_key), tl.load(row_key + 1)
        total += _mix(word ^ row_mixers[:, None] ^ key) * row_weights[:, None]
        places += stride * ROWS
        row_key += ROWS * 2
    share = tl.sum(tl.sum(total * weights, 1), 0)
    tl.atomic_add(totals + tl.load(tile + 7), share.to(tl.int64, bitcast=True), sem="relaxed")


@dataclass(frozen=True, slots=True)
class _Slots:
    """The owner of each slot of the totals."""

    names: list[str]
    """Slot i < len(names) is the share of names[i]."""
    twins: list[tuple[str, str, int, int]]
    """(tensor, parameter, slot of the first copy of a region, slot of the second)."""
    count: int


class DigestTable:
    """This rank's checksum shares on a GPU; `digest.digest` defines them."""

    def __init__(
        self,
        layout: MemoryLayout,
        parameters: Mapping[str, Tensor],
        names: Sequence[str],
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        units: Mapping[str, int] | None = None,
        seed: int = 0,
    ):
        """Args:
            names: tensors in the order of the shares.
            dtypes: number format in which each tensor is digested; a missing one keeps its own.
            units: see DigestPlan.
            seed: seed of the keys.

        Raises:
            WeightSyncFailed: a number format without a digest.
        """
        device = next(iter(parameters.values())).device
        # The tables hold addresses, so their owner must keep the memory alive.
        self._parameters = parameters
        self._slots, boxes = _boxes(layout, parameters, names, dtypes or {}, units or {})
        self._totals = torch.zeros(self._slots.count, dtype=torch.int64, device=device)
        highest = [(box.row + box.rows, box.col + box.cols) for each in layout.boxes.values() for box in each]
        self._keys = tuple(
            _interleaved(axis, max((end[index] for end in highest), default=1), seed, device)
            for index, axis in enumerate(("row", "col"))
        )
        self._launches: list[tuple[int, Tensor, dict[str, Any]]] = []
        for (held, seen, unit), table in boxes.items():
            self._add(np.array(table, dtype=np.int64), held, seen, unit, device)

    def _add(self, boxes: NDArray, held: torch.dtype, seen: torch.dtype, unit: int, device: torch.device) -> None:
        """Adds one launch for each kind of tile that these boxes have."""
        size = held.itemsize
        several = np.where(boxes[:, 5] > 1, boxes[:, 1] * size, 0)
        aligned = (boxes[:, 0] | boxes[:, 6] * unit * size | several) % 16 == 0
        direct = (boxes[:, 2] == 1) & aligned & (held == seen) & (unit * size == 8)
        # A power of two that divides the width leaves no partial tiles.
        dividing = boxes[:, 6] & -boxes[:, 6]
        widths = np.clip(np.where(dividing >= MIN_COLS, dividing, MAX_COLS), MIN_COLS, MAX_COLS)
        widths = np.where(boxes[:, 6] < widths, MIN_COLS, widths)
        for at_once in (True, False):
            for cols in np.unique(widths[direct == at_once]).tolist():
                rows = max(1, BLOCK // cols)
                tiles = _tiles(boxes[(direct == at_once) & (widths == cols)], rows * STEPS, cols, unit, size)
                whole = (tiles[:, 5] >= rows * STEPS) & (tiles[:, 6] >= cols) & at_once
                for masked in (False, True):
                    part = np.ascontiguousarray(tiles[whole != masked])
                    options = {"ROWS": rows, "COLS": cols, "STEPS": STEPS, "MASKED": masked, "DIRECT": at_once}
                    options |= {"UNIT": unit, "HELD": FORMATS[held], "SEEN": FORMATS[seen], "num_warps": WARPS}
                    if len(part):
                        self._launches.append((len(part), torch.from_numpy(part).to(device), options))
        if boxes.size:
            # Compiled before its first real use.
            self.launch()

    def launch(self) -> None:
        """Adds every tile's share to the totals, on the current stream."""
        kernel: Any = _digest
        for count, tiles, options in self._launches:
            kernel[(count,)](tiles, *self._keys, self._totals, **options)

    def shares(self) -> NDArray[np.uint64]:
        """Returns [N] this rank's share of each tensor's digest, 0 for tensors it does not hold.

        Raises:
            WeightSyncFailed: a region held twice (a tied weight) with two contents.
        """
        self._totals.zero_()
        self.launch()
        totals = self._totals.cpu().numpy().view(np.uint64)
        for tensor, parameter, first, second in self._slots.twins:
            if totals[first] != totals[second]:
                raise WeightSyncFailed(twin_differs(tensor, parameter))
        return totals[: len(self._slots.names)].copy()


def _tiles(boxes: NDArray, tile_rows: int, tile_cols: int, unit: int, size: int) -> NDArray:
    """Returns [tiles, COLUMNS] int64 of boxes in the same columns."""
    down, across = -(-boxes[:, 5] // tile_rows), -(-boxes[:, 6] // tile_cols)
    counts = down * across
    box = np.repeat(np.arange(len(boxes)), counts)
    index = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    row, word = index // across[box] * tile_rows, index % across[box] * tile_cols
    tiles = boxes[box]
    tiles[:, 0] += (row * tiles[:, 1] + word * unit * tiles[:, 2]) * size
    tiles[:, 3] += row
    tiles[:, 4] += word
    tiles[:, 5] -= row
    tiles[:, 6] -= word
    return tiles


def _interleaved(axis: str, count: int, seed: int, device: torch.device) -> Tensor:
    """Returns [count, 2] mixer and weight of each index, next to each other."""
    found = keys(axis, count, seed)
    pairs = np.stack([found.mixers[:count], found.weights[:count]], axis=1)
    return torch.from_numpy(pairs.view(np.int64)).to(device).view(torch.uint64)


def _boxes(
    layout: MemoryLayout,
    parameters: Mapping[str, Tensor],
    names: Sequence[str],
    dtypes: Mapping[str, torch.dtype],
    units: Mapping[str, int],
) -> tuple[_Slots, dict[tuple[torch.dtype, torch.dtype, int], list[tuple[int, ...]]]]:
    """Returns (slots, boxes in COLUMNS by (format held, format seen, elements of a word))."""
    rows: dict[tuple[torch.dtype, torch.dtype, int], list[tuple[int, ...]]] = {}
    twins: list[tuple[str, str, int, int]] = []
    count = len(names)

    def add(box: Box, slot: int) -> None:
        parameter = parameters[box.parameter]
        seen = dtypes.get(box.tensor, parameter.dtype)
        if seen not in BITS:
            raise WeightSyncFailed(f"{box.tensor} is held as {seen}; digests know {', '.join(map(str, BITS))}")
        unit = word_elements(units.get(box.tensor, 1), seen)
        address = parameter.data_ptr() + box.offset * parameter.dtype.itemsize
        place = (box.row, box.col // unit, box.rows, box.cols // unit)
        rows.setdefault((parameter.dtype, seen, unit), []).append(
            (address, box.row_stride, box.col_stride, *place, slot)
        )

    for index, name in enumerate(names):
        first, others = distinct(layout.boxes.get(name, ()))
        for box in first:
            add(box, index)
        for twin in others:
            original = next(box for box in first if box.region == twin.region)
            twins.append((name, twin.parameter, count, count + 1))
            add(original, count)
            add(twin, count + 1)
            count += 2
    return _Slots(list(names), twins, count), rows
