"""The plan of a sync: which copies carry every source piece to its place. Pure data, made once per connection."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Box, Region
from rlframe.weight_sync.layout import Layout


@dataclass(frozen=True, slots=True)
class Place:
    """Where one side of a copy lies: elements of a parameter, counted from its first."""

    parameter: str
    offset: int
    row_stride: int
    col_stride: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided block from one source rank to one destination rank."""

    tensors: tuple[str, ...]
    """The Hugging Face tensors it carries parts of: one, or several that lie side by side on both sides."""
    source: int
    """Source rank."""
    rows: int
    cols: int
    read: Place
    """In the source rank's memory."""
    write: Place
    """In the destination rank's memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every copy of one sync, by destination rank."""

    copies: tuple[tuple[Copy, ...], ...]
    """[destination ranks]"""
    link_bytes: dict[tuple[int, int], int]
    """Bytes read by (source rank, destination rank)."""

    @property
    def total_bytes(self) -> int:
        """Bytes read from sources in one sync."""
        return sum(self.link_bytes.values())

    def copies_for(self, destination: int) -> tuple[Copy, ...]:
        """What destination rank `destination` pulls."""
        return self.copies[destination]

    def describe(self) -> str:
        """Copies and bytes per link and in total, one line per link."""
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for destination, copies in enumerate(self.copies):
            for copy in copies:
                counts[copy.source, destination] += 1
        total = f"weight sync plan: {sum(counts.values())} copies, {self.total_bytes / 1e6:.3f} MB"
        links = [
            f"  source {source} -> destination {destination}: {counts[source, destination]} copies, {size / 1e6:.3f} MB"
            for (source, destination), size in sorted(self.link_bytes.items())
        ]
        return "\n".join([total, *links])


def make_plan(
    sources: list[Layout], destinations: list[Layout], *, source_hosts: list[str], destination_hosts: list[str]
) -> Plan:
    """Copies that write every element of every destination box once, from a source that holds it.

    Among replicas one on the destination's host is read, else the one that has been read least so far.

    Args:
        source_hosts: host of each source rank.
        destination_hosts: host of each destination rank.

    Raises:
        WeightSyncFailed: the two sides disagree on a shape, or no source holds part of a destination box.
    """
    check_shapes(sources, destinations)
    planner = _Planner(sources, source_hosts)
    copies, link_bytes = [], {}
    for rank, (layout, host) in enumerate(zip(destinations, destination_hosts, strict=True)):
        mine = [copy for boxes in layout.boxes.values() for box in boxes for copy in planner.copies(box, host)]
        for copy in mine:
            size = copy.rows * copy.cols * sources[copy.source].parameters[copy.read.parameter].dtype.itemsize
            link_bytes[copy.source, rank] = link_bytes.get((copy.source, rank), 0) + size
        copies.append(tuple(_merge(mine)))
    return Plan(tuple(copies), link_bytes)


def check_shapes(sources: list[Layout], destinations: list[Layout]) -> None:
    """Raises WeightSyncFailed when two ranks recorded different shapes of a tensor that both know."""
    shapes: dict[str, tuple[int, ...]] = {}
    for side, layouts in (("source", sources), ("destination", destinations)):
        for rank, layout in enumerate(layouts):
            for name, shape in layout.tensors.items():
                if shapes.setdefault(name, shape) != shape:
                    raise WeightSyncFailed(
                        f"{name} has shape {list(shape)} on {side} rank {rank} and {list(shapes[name])} elsewhere"
                    )


def refine(tensor: str, sources: list[Layout], destinations: list[Layout]) -> list[Region]:
    """The regions of `tensor` that lie in one piece on both sides, in order: what a difference is narrowed down to."""
    mine, theirs = (
        {box.region for layout in side for box in layout.boxes.get(tensor, ())} for side in (sources, destinations)
    )
    return sorted({common for a in mine for b in theirs if (common := a.intersect(b))})


class _Planner:
    """Finds sources for destination boxes, and remembers how much each source has been asked for."""

    def __init__(self, sources: list[Layout], hosts: list[str]):
        self._sources, self._hosts = sources, hosts
        self._load = [0] * len(sources)
        self._holders: dict[str, dict[Region, list[tuple[int, Box]]]] = defaultdict(lambda: defaultdict(list))
        for rank, layout in enumerate(sources):
            for name, boxes in layout.boxes.items():
                for box in boxes:
                    self._holders[name][box.region].append((rank, box))

    def copies(self, destination: Box, host: str) -> Iterator[Copy]:
        """Copies that together fill `destination`, which lies on `host`."""
        missing = [destination.region]
        for region, holders in self._nearest(destination, host):
            rank, source = min(holders, key=lambda holder: (self._hosts[holder[0]] != host, self._load[holder[0]]))
            still_missing = []
            for part in missing:
                common = part.intersect(region)
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

    def _nearest(self, destination: Box, host: str) -> list[tuple[Region, list[tuple[int, Box]]]]:
        """The source regions of the tensor with their holders, those with a holder on `host` first."""
        regions = self._holders.get(destination.tensor, {}).items()
        return sorted(regions, key=lambda item: all(self._hosts[rank] != host for rank, _ in item[1]))


def _copy(rank: int, source: Box, destination: Box, region: Region) -> Copy:
    read, write = (
        Place(box.parameter, box.offset_of(region), box.row_stride, box.col_stride) for box in (source, destination)
    )
    return Copy((source.tensor,), rank, region.rows, region.cols, read, write)


def _merge(copies: list[Copy]) -> Iterator[Copy]:
    """The same copies, those that continue each other on both sides joined (the up rows below the gate rows, say)."""
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
    """Both as one copy, where `second` continues `first` along rows or along columns on both sides."""
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
