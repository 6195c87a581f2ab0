"""Plans one box at a time. It defines what a plan is, and names what no source holds. Trainers whose parts of a tensor
overlap without being equal are planned so; `tables` plans all others, and tests compare the two."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, Region
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.plan.copies import Copies, Copy, Place

Holders = list[tuple[int, Box]]
"""Replicas of a region: source rank and position there."""


def plan_piecewise(
    sources: Sequence[MemoryLayout],
    destinations: Sequence[MemoryLayout],
    here: list[tuple[str, str]],
    there: list[tuple[str, str]],
) -> list[Copies]:
    """Returns the copies of each destination rank.

    Args:
        here: host and device of each source rank.
        there: the same of each destination rank.

    Raises:
        WeightSyncFailed: no source holds part of a destination box.
    """
    planner, plan = _Planner(sources, here), []
    for rank, (layout, place) in enumerate(zip(destinations, there, strict=True)):
        mine = [copy for boxes in layout.boxes.values() for box in boxes for copy in planner.copies(box, place)]
        plan.append(Copies.of((rank, copy) for copy in _merge(mine)))
    return plan


class _Planner:
    """Finds sources for destination boxes, and counts the load of each source."""

    def __init__(self, sources: Sequence[MemoryLayout], places: list[tuple[str, str]]):
        self._places = places
        self._load = [0] * len(sources)
        self._holders: dict[str, dict[Region, Holders]] = defaultdict(lambda: defaultdict(list))
        for rank, layout in enumerate(sources):
            for name, boxes in layout.boxes.items():
                held = self._holders[name]
                for box in boxes:
                    held[box.region].append((rank, box))

    def copies(self, destination: Box, place: tuple[str, str]) -> Iterator[Copy]:
        """Yields copies that together fill `destination`, which is at `place`, a host and a device."""
        wanted = destination.region
        missing = [wanted]
        distance = [(source[1] == "cpu" or source != place, source[0] != place[0]) for source in self._places]
        for region, holders in self._nearest(destination.tensor, distance):
            still_missing = []
            rank, source = self._choose(holders, distance)
            for part in missing:
                common = part if part == region else part.intersect(region)
                if common is None:
                    still_missing.append(part)
                    continue
                still_missing += part.minus(common)
                self._load[rank] += common.size
                yield _copy(rank, source, destination, common)
            missing = still_missing
            if not missing:
                return
        raise WeightSyncFailed(
            f"no source rank holds rows {missing[0].row}..{missing[0].row + missing[0].rows - 1}, columns "
            f"{missing[0].col}..{missing[0].col + missing[0].cols - 1} of {destination.tensor}, which parameter "
            f"{destination.parameter} of an engine needs"
        )

    def _choose(self, holders: Holders, distance: list[tuple[bool, bool]]) -> tuple[int, Box]:
        """Returns the nearest holder, and of equals the least loaded."""
        if len(holders) == 1:
            return holders[0]
        return min(holders, key=lambda holder: (distance[holder[0]], self._load[holder[0]]))

    def _nearest(self, tensor: str, distance: list[tuple[bool, bool]]) -> Iterable[tuple[Region, Holders]]:
        """Returns the source regions of the tensor with their holders, those with the nearest holder first."""
        regions = self._holders.get(tensor, {}).items()
        if len(regions) < 2:
            return regions
        return sorted(regions, key=lambda item: min(distance[rank] for rank, _ in item[1]))


def _copy(rank: int, source: Box, destination: Box, region: Region) -> Copy:
    read, write = (
        Place(box.parameter, box.offset_of(region), box.row_stride, box.col_stride) for box in (source, destination)
    )
    return Copy((source.tensor,), rank, region.rows, region.cols, read, write)


def _merge(copies: list[Copy]) -> Iterator[Copy]:
    """Yields the same copies, with those joined that continue each other on both sides (such as the up rows below the
    gate rows)."""
    pending = None
    for copy in sorted(
        copies, key=lambda copy: (copy.source, copy.read.parameter, copy.write.parameter, copy.read.offset)
    ):
        joined = pending and _joined(pending, copy)
        if pending and not joined:
            yield pending
        pending = joined or copy
    if pending:
        yield pending


def _joined(first: Copy, second: Copy) -> Copy | None:
    """Returns both as one copy if `second` continues `first` along rows or along columns on both sides."""
    sides = ((first.read, second.read), (first.write, second.write))
    if first.source != second.source or any(
        (a.parameter, a.row_stride, a.col_stride) != (b.parameter, b.row_stride, b.col_stride) for a, b in sides
    ):
        return None
    tensors = tuple(dict.fromkeys(first.tensors + second.tensors))
    if first.cols == second.cols and all(b.offset - a.offset == first.rows * a.row_stride for a, b in sides):
        return Copy(tensors, first.source, first.rows + second.rows, first.cols, first.read, first.write)
    if first.rows == second.rows and all(b.offset - a.offset == first.cols * a.col_stride for a, b in sides):
        return Copy(tensors, first.source, first.rows, first.cols + second.cols, first.read, first.write)
    return None
