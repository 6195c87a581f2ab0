"""Digests of a rank's memory, on the CPU or by the kernels of `digest_kernels`. `terms` defines the sum."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, Region
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.proof.terms import (
    BITS,
    WORD_BYTES,
    distinct,
    keys,
    twin_differs,
    word_elements,
    words,
    words_digest,
)

CHUNK = 1 << 14
"""Words mixed at a time on the CPU: as many as fit a core's cache."""


class DigestPlan:
    """Computes a rank's digest shares repeatedly. Everything constant is looked up once.

    Example:
        >>> plan = DigestPlan(layout, parameters)
        >>> dict(zip(layout.tensors, plan.shares()))["model.norm.weight"]
    """

    def __init__(
        self,
        layout: MemoryLayout,
        parameters: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        names: Sequence[str] | None = None,
        units: Mapping[str, int] | None = None,
        seed: int = 0,
    ):
        """Looks up the rank's pieces. The parameters' memory must not move.

        Args:
            dtypes: format to cast each tensor to first, for a comparison with a copy of lower precision; as held when
                absent.
            names: the tensors to digest, all those of the layout when None.
            units: elements, 1, 2, 4 or 8, of which every box of a tensor begins and ends at a multiple in its columns,
                on all ranks whose shares are added or compared; 1 when absent. See `common_units`.
            seed: 0..2^64-1, the same on all ranks whose shares are added or compared.

        Raises:
            WeightSyncFailed: a number format without a digest.
        """
        self._size = len(layout.tensors)
        wanted = layout.boxes.keys() if names is None else layout.boxes.keys() & set(names)
        self._held = [(index, name) for index, name in enumerate(layout.tensors) if name in wanted]
        self.indices = np.array([index for index, _ in self._held], dtype=np.int64)
        """[n] indices of the digested tensors in the layout."""
        self._parameters, self._dtypes, self._units, self._seed = parameters, dtypes or {}, units or {}, seed
        held = [name for _, name in self._held]
        self._table = None
        if held and parameters[layout.boxes[held[0]][0].parameter].is_cuda:
            # Triton exists only with CUDA.
            from rlframe.weight_sync.proof.digest_kernels import DigestTable

            self._table = DigestTable(layout, parameters, held, self._dtypes, units=units, seed=seed)
        else:
            self._distinct = [distinct(layout.boxes[name]) for name in held]
            for name in held:
                _known_format(layout.boxes[name][0], self._dtypes.get(name, layout.dtype(name)))

    def shares(self) -> NDArray[np.uint64]:
        """Returns [tensors of the layout] this rank's share of each tensor's digest, 0 for tensors it does not hold.
        Each region counts once.

        Raises:
            WeightSyncFailed: a region held twice (a tied weight) with two contents.
        """
        shares = np.zeros(self._size, dtype=np.uint64)
        if self._table is not None:
            shares[self.indices] = self._table.shares()
        elif self._held:
            shares[self.indices] = [
                self._share(name, *pieces) for (_, name), pieces in zip(self._held, self._distinct, strict=True)
            ]
        return shares

    def _share(self, name: str, first: list[Box], twins: list[Box]) -> np.uint64:
        dtype, unit = self._dtypes.get(name), self._units.get(name, 1)

        def whole(box: Box) -> np.uint64:
            return _region_digest(box, self._parameters, box.region, dtype, unit, self._seed)

        parts = {box.region: whole(box) for box in first}
        for twin in twins:
            if whole(twin) != parts[twin.region]:
                raise WeightSyncFailed(twin_differs(name, twin.parameter))
        return np.array(list(parts.values()), dtype=np.uint64).sum(dtype=np.uint64)


def digest(
    layout: MemoryLayout,
    parameters: Mapping[str, Tensor],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    units: Mapping[str, int] | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """Returns this rank's share, 0..2^64-1, of the digest of each tensor it holds part of. The arguments are those of
    DigestPlan."""
    shares = DigestPlan(layout, parameters, dtypes, units=units, seed=seed).shares().tolist()
    return {name: share for name, share in zip(layout.tensors, shares, strict=True) if name in layout.boxes}


def region_digests(
    boxes: Iterable[Box],
    parameters: Mapping[str, Tensor],
    regions: Iterable[Region],
    *,
    dtype: torch.dtype | None = None,
    unit: int = 1,
    seed: int = 0,
) -> dict[Region, int]:
    """Returns the digest of each of `regions`, which are split at multiples of `unit`, that lies wholly in one of the
    boxes."""
    found = {}
    boxes = list(boxes)
    for region in regions:
        box = next((box for box in boxes if box.region.intersect(region) == region), None)
        if box is not None:
            found[region] = int(_region_digest(box, parameters, region, dtype, unit, seed))
    return found


def common_units(layouts: Iterable[MemoryLayout]) -> dict[str, int]:
    """Returns the largest `unit` of each tensor that suits all these ranks, for units above 1."""
    ends: dict[str, int] = {}
    for layout in layouts:
        for name, boxes in layout.boxes.items():
            ends[name] = math.gcd(ends.get(name, WORD_BYTES), *(end for box in boxes for end in (box.col, box.cols)))
    return {name: unit for name, unit in ends.items() if unit > 1}


def _region_digest(
    box: Box, parameters: Mapping[str, Tensor], region: Region, dtype: torch.dtype | None, unit: int, seed: int
) -> np.uint64:
    """Returns the digest computed on the CPU. Data on a GPU is copied there, which only the search for a difference
    needs."""
    view = box.view(parameters, region)
    dtype = dtype or view.dtype
    _known_format(box, dtype)
    unit = word_elements(unit, dtype)
    row_keys = keys("row", region.row + region.rows, seed)
    first, count = region.col // unit, region.cols // unit
    cols = keys("col", first + count, seed).part(first, count)
    total = np.zeros((), dtype=np.uint64)
    step = max(1, CHUNK // count)
    for start in range(0, region.rows, step):
        # A copy: torch will not resize a storage that numpy has viewed, as sleeping optimizers do with theirs.
        part = view[start : start + step].to(dtype, copy=True).contiguous().cpu().view(BITS[dtype]).numpy()
        total += words_digest(words(part, unit), row_keys.part(region.row + start, len(part)), cols)
    return np.uint64(total)


def _known_format(box: Box, dtype: torch.dtype) -> None:
    if dtype not in BITS:
        raise WeightSyncFailed(f"{box.tensor} is held as {dtype}; digests know {', '.join(map(str, BITS))}")
