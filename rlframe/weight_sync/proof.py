"""From the digest shares of ranks to the digest of a tensor: who holds which part, who must agree with whom."""

from collections import defaultdict
from collections.abc import Mapping

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Region, matrix_shape
from rlframe.weight_sync.layout import Layout

Cover = dict[str, dict[tuple[Region, ...], list[int]]]
"""Per tensor: the ranks that hold each set of regions. Ranks of one set are replicas; the sets partition the tensor."""


def cover(layouts: Mapping[int, Layout], *, side: str) -> Cover:
    """How the ranks of `layouts` together hold each tensor of which they hold anything.

    Args:
        layouts: by rank.
        side: who they are, for the message, such as `engine 0`.

    Raises:
        WeightSyncFailed: their parts overlap without being equal, or leave something of the tensor out.
    """
    covers: Cover = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, layout in layouts.items():
        shapes |= layout.tensors
        for name, boxes in layout.boxes.items():
            covers[name][tuple(sorted({box.region for box in boxes}))].append(rank)
    for name, holders in covers.items():
        regions = sorted(region for part in holders for region in part)
        if overlap := _first_overlap(regions):
            raise WeightSyncFailed(f"{side} holds {overlap[0]} and {overlap[1]} of {name}, which overlap")
        rows, cols = matrix_shape(shapes[name])
        if (held := sum(region.size for region in regions)) != rows * cols:
            raise WeightSyncFailed(f"{side} holds only {held} of the {rows * cols} elements of {name}")
    return {name: dict(holders) for name, holders in covers.items()}


def disagreement(holders: Mapping[tuple[Region, ...], list[int]], shares: Mapping[int, int]) -> list[int]:
    """Two replicas with different shares of a tensor, or an empty list.

    Args:
        shares: digest share by rank.
    """
    for ranks in holders.values():
        for rank in ranks[1:]:
            if shares[rank] != shares[ranks[0]]:
                return [ranks[0], rank]
    return []


def total(holders: Mapping[tuple[Region, ...], list[int]], shares: Mapping[int, int]) -> int:
    """Digest of the whole tensor: the shares of one rank per distinct part."""
    return sum(shares[ranks[0]] for ranks in holders.values()) % (1 << 64)


def _first_overlap(regions: list[Region]) -> tuple[Region, Region] | None:
    """Two that share an element, or None. `regions` is sorted by row, so that a look ahead ends early."""
    for index, first in enumerate(regions):
        for second in regions[index + 1 :]:
            if second.row >= first.row + first.rows:
                break
            if first.intersect(second):
                return first, second
    return None
