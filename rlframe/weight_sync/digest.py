"""Positional checksum of tensors, which adds up over shards.

    digest(x) = sum over elements of bits(x[row, col]) * r(row) * c(col)   mod 2^64

with r and c odd 64-bit numbers, splitmix64 of the index. `bits` is the element's pattern read as an unsigned number, so
-0.0 and 0.0 differ and NaN equals itself. Being a sum, the digest of a tensor is the sum of the digests of any
partition of it, whoever holds the parts.

**A change of any single element is always seen.** It adds (b' - b) * r * c to the sum, with 0 < |b' - b| < 2^32. An odd
number has an inverse mod 2^64, so that r * c is odd and the product can be 0 only if b' - b is. Two elements that
change places, rows that move and shards that are swapped meet other multipliers and pass unseen once in about 2^64.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Box, Region
from rlframe.weight_sync.layout import Layout

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
"""Unsigned type with the bits of each number format."""
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Elements widened to 64 bits at a time, by device: what fits a core's cache takes 1 ns per element, not 4; a GPU wants
few launches."""
SEEDS = {"row": 0x243F6A8885A308D3, "col": 0x13198A2E03707344}
"""First digits of pi, so that rows and columns have multipliers of their own."""


class DigestPlan:
    """A rank's digest shares, worked out again and again: what does not change is looked up once.

    Example:
        >>> plan = DigestPlan(layout, parameters)
        >>> dict(zip(layout.tensors, plan.shares()))["model.norm.weight"]
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        names: Sequence[str] | None = None,
    ):
        """Look up the rank's pieces. The parameters' memory must stay where it is.

        Args:
            dtypes: format to cast each tensor to first, for a comparison with a copy of lower precision; as held when
                absent.
            names: the tensors to digest, all those of the layout when None.

        Raises:
            WeightSyncFailed: a number format without a digest.
        """
        self._size = len(layout.tensors)
        wanted = layout.boxes.keys() if names is None else layout.boxes.keys() & set(names)
        self._held = [(index, name) for index, name in enumerate(layout.tensors) if name in wanted]
        self._indices = np.array([index for index, _ in self._held], dtype=np.int64)
        self._parameters, self._dtypes, self._boxes = parameters, dtypes or {}, layout.boxes
        held = [name for _, name in self._held]
        self._table = None
        if held and parameters[layout.boxes[held[0]][0].parameter].is_cuda:
            # Triton is there only where CUDA is.
            kernels = importlib.import_module("rlframe.weight_sync.kernels")
            self._table = kernels.DigestTable(layout, parameters, held, self._dtypes)
        else:
            self._distinct = [_distinct(layout.boxes[name]) for name in held]
            for name in held:
                _known_format(layout.boxes[name][0], self._dtypes.get(name, layout.dtype(name)))

    def shares(self) -> NDArray[np.uint64]:
        """[tensors of the layout] this rank's share of each tensor's digest, 0 where it holds nothing; each region
        counts once.

        Raises:
            WeightSyncFailed: a region held twice (a tied weight) with two contents.
        """
        shares = np.zeros(self._size, dtype=np.uint64)
        if self._table is not None:
            shares[self._indices] = self._table.shares()
        elif self._held:
            values = [self._share(name, *pieces) for (_, name), pieces in zip(self._held, self._distinct, strict=True)]
            shares[self._indices] = torch.stack(values).numpy().view(np.uint64)
        return shares

    def _share(self, name: str, distinct: list[Box], twins: list[Box]) -> Tensor:
        """int64 scalar, wrapped."""
        dtype = self._dtypes.get(name)
        parts = [_region_digest(box, self._parameters, box.region, dtype) for box in distinct]
        for twin in twins:
            first = next(part for box, part in zip(distinct, parts, strict=True) if box.region == twin.region)
            if _region_digest(twin, self._parameters, twin.region, dtype) != first:
                raise WeightSyncFailed(f"{name}: parameter {twin.parameter} holds another copy of it that differs")
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def digest(
    layout: Layout, parameters: Mapping[str, Tensor], *, dtypes: Mapping[str, torch.dtype] | None = None
) -> dict[str, int]:
    """This rank's share, 0..2^64-1, of the digest of each tensor it holds part of. Arguments as of DigestPlan."""
    shares = DigestPlan(layout, parameters, dtypes).shares().tolist()
    return {name: share for name, share in zip(layout.tensors, shares, strict=True) if name in layout.boxes}


def region_digests(
    boxes: Iterable[Box],
    parameters: Mapping[str, Tensor],
    regions: Iterable[Region],
    *,
    dtype: torch.dtype | None = None,
) -> dict[Region, int]:
    """The digest of each of `regions` that lies wholly in one of the boxes."""
    found = {}
    boxes = list(boxes)
    for region in regions:
        box = next((box for box in boxes if box.region.intersect(region) == region), None)
        if box is not None:
            found[region] = int(_region_digest(box, parameters, region, dtype)) % (1 << 64)
    return found


def _distinct(boxes: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """(the first box of each region, the others)."""
    first: dict[Region, Box] = {}
    twins = [box for box in boxes if first.setdefault(box.region, box) is not box]
    return list(first.values()), twins


def _region_digest(box: Box, parameters: Mapping[str, Tensor], region: Region, dtype: torch.dtype | None) -> Tensor:
    """int64 scalar, wrapped."""
    view = box.view(parameters, region)
    dtype = dtype or view.dtype
    _known_format(box, dtype)
    rows = multipliers("row", region.row + region.rows, view.device)[region.row :]
    cols = multipliers("col", region.col + region.cols, view.device)[region.col :]
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    step = max(1, CHUNK[view.device.type] // region.cols)
    for start in range(0, region.rows, step):
        part = view[start : start + step].to(dtype).contiguous().view(BITS[dtype]).to(torch.int64)
        total += ((part * cols).sum(1) * rows[start : start + step]).sum()
    return total


def _known_format(box: Box, dtype: torch.dtype) -> None:
    if dtype not in BITS:
        raise WeightSyncFailed(f"{box.tensor} is held as {dtype}; digests know {', '.join(map(str, BITS))}")


_cache: dict[tuple[str, torch.device], Tensor] = {}


def multipliers(kind: str, count: int, device: torch.device) -> Tensor:
    """[count] odd int64: splitmix64 of seed + index, last bit set. Kept between calls.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    """
    cached = _cache.get((kind, device))
    if cached is None or cached.numel() < count:
        size = 1 << max(count - 1, 1).bit_length()
        state = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
        state += _signed(SEEDS[kind])
        state = (state ^ _shift_right(state, 30)) * _signed(0xBF58476D1CE4E5B9)
        state = (state ^ _shift_right(state, 27)) * _signed(0x94D049BB133111EB)
        cached = _cache[kind, device] = (state ^ _shift_right(state, 31)) | 1
    return cached[:count]


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number; products mod 2^64 have the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
