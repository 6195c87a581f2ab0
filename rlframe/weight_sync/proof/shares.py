"""Combines the digest shares of ranks into the digest of a tensor: which ranks hold which part, and which must
agree."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Region, matrix_shape
from rlframe.weight_sync.layout.memory import MemoryLayout

Cover = dict[str, dict[tuple[Region, ...], list[int]]]
"""Per tensor: the ranks that hold each set of regions. Ranks of one set are replicas; the sets partition the tensor."""


def cover(layouts: Mapping[int, MemoryLayout], *, side: str) -> Cover:
    """Returns how the ranks of `layouts` together hold each tensor of which they hold a part.

    Args:
        layouts: layouts by rank.
        side: name of the ranks, for the message, such as `engine 0`.

    Raises:
        WeightSyncFailed: their parts overlap without being equal, or do not cover the tensor.
    """
    covers: Cover = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[int, dict[str, tuple[Region, ...]]] = {}
    for layout in {id(layout): layout for layout in layouts.values()}.values():
        shapes |= layout.tensors
        held = layout.boxes.items()
        parts[id(layout)] = {name: tuple(sorted({box.region for box in boxes})) for name, boxes in held}
    for rank, layout in layouts.items():
        for name, regions in parts[id(layout)].items():
            covers[name][regions].append(rank)
    for name, holders in covers.items():
        regions = sorted(region for part in holders for region in part)
        if overlap := _first_overlap(regions):
            raise WeightSyncFailed(f"{side} holds {overlap[0]} and {overlap[1]} of {name}, which overlap")
        rows, cols = matrix_shape(shapes[name])
        if (held := sum(region.size for region in regions)) != rows * cols:
            raise WeightSyncFailed(f"{side} holds only {held} of the {rows * cols} elements of {name}")
    return {name: dict(holders) for name, holders in covers.items()}


class Shares:
    """Holders of each part of each tensor, as index arrays, so that 18,867 tensors are compared in well under 1 ms."""

    def __init__(self, covers: Cover, ranks: Sequence[int], names: Sequence[str]):
        """Computes the arrays.

        Args:
            ranks: the ranks of this side in the order of the rows that `totals` and `drift` get.
            names: the tensors in the order of the columns; those without a cover count as 0.
        """
        rows = {rank: row for row, rank in enumerate(ranks)}
        self.ranks = list(ranks)
        self.held = np.zeros(len(names), dtype=bool)
        """[names] whether this side holds the tensor."""
        self._first = np.zeros((len(rows), len(names)), dtype=bool)
        """[ranks, names] whether the rank's share counts: one rank of each distinct part."""
        self._leader = np.repeat(np.arange(len(rows))[:, None], len(names), axis=1)
        """[ranks, names] row of the rank that must have the same share."""
        for column, name in enumerate(names):
            for holders in covers.get(name, {}).values():
                leader = rows[holders[0]]
                self.held[column] = self._first[leader, column] = True
                for replica in holders[1:]:
                    self._leader[rows[replica], column] = leader
        replicas = np.flatnonzero(self._leader != np.arange(len(rows))[:, None])
        self._replicas = np.unravel_index(replicas, self._leader.shape)
        self._leaders = self._leader[self._replicas], self._replicas[1]

    def of_ranks(self, ranks: Sequence[int]) -> "Shares":
        """Returns the same holders under other numbers of the ranks."""
        same = copy(self)
        same.ranks = list(ranks)
        return same

    def totals(self, shares: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns [names] digest of each whole tensor, mod 2^64.

        Args:
            shares: [ranks, names]
        """
        return np.where(self._first, shares, np.uint64(0)).sum(axis=0, dtype=np.uint64)

    def drifted(self, shares: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns [ranks, names] where a rank's share differs from that of the rank it replicates."""
        found = np.zeros(shares.shape, dtype=bool)
        found[self._replicas] = shares[self._replicas] != shares[self._leaders]
        return found

    def first_drift(self, shares: NDArray[np.uint64]) -> tuple[int, int, int] | None:
        """Returns (column, rank, replica) of the first tensor whose replicas differ, or None."""
        drifted = self.drifted(shares)
        columns = np.flatnonzero(drifted.any(axis=0))
        if not columns.size:
            return None
        column = int(columns[0])
        row = int(np.flatnonzero(drifted[:, column])[0])
        return column, self.ranks[self._leader[row, column]], self.ranks[row]


def _first_overlap(regions: list[Region]) -> tuple[Region, Region] | None:
    """Returns two regions that share an element, or None. `regions` is sorted by row, so that the search ends early."""
    for index, first in enumerate(regions):
        for second in regions[index + 1 :]:
            if second.row >= first.row + first.rows:
                break
            if first.intersect(second):
                return first, second
    return None
