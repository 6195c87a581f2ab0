"""The plan of a sync: the copies that carry every source piece to its place. Pure data, made once per connection."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, Region
from rlframe.weight_sync.layout.memory import MemoryLayout


@dataclass(frozen=True, slots=True)
class Place:
    """Position of one side of a copy: elements of a parameter, counted from its first."""

    parameter: str
    offset: int
    row_stride: int
    col_stride: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided block from one source rank to one destination rank."""

    tensors: tuple[str, ...]
    """Names of the Hugging Face tensors of which it carries parts: one, or several that are adjacent on both sides."""
    source: int
    """Source rank."""
    rows: int
    cols: int
    read: Place
    """Position in the source rank's memory."""
    write: Place
    """Position in the destination rank's memory."""


class Kind(StrEnum):
    """The medium of a link between two ranks."""

    DEVICE = "device"
    """Within one GPU."""
    PEER = "peer"
    """Between two GPUs of one host."""
    NETWORK = "network"
    """Between two hosts."""
    MEMORY = "memory"
    """Between parameters in host memory on one host; no speed is assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeeds:
    """Payload of links in GB/s in one direction, for the lower bound of a plan. The defaults were measured on 4 x
    H200."""

    device: float = 2117.0
    """Copies within one GPU's memory."""
    peer: float = 394.0
    """Copies over NVLink between two GPUs of a host."""
    network: float = 55.0
    """The link of the host. The network behind it may be slower."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every copy of one sync, by destination rank."""

    copies: tuple[tuple[Copy, ...], ...]
    """[destination ranks] copies of each."""
    link_bytes: dict[tuple[int, int], int]
    """Bytes read, by (source rank, destination rank)."""
    link_kinds: dict[tuple[int, int], Kind] = field(default_factory=dict)
    """Medium of each of those links."""

    @property
    def total_bytes(self) -> int:
        """Bytes read from sources in one sync."""
        return sum(self.link_bytes.values())

    @property
    def num_copies(self) -> int:
        """Number of strided blocks moved in one sync."""
        return sum(map(len, self.copies))

    @property
    def kind_bytes(self) -> dict[Kind, int]:
        """Bytes by medium."""
        sums: dict[Kind, int] = {}
        for link, size in self.link_bytes.items():
            kind = self.link_kinds.get(link, Kind.MEMORY)
            sums[kind] = sums.get(kind, 0) + size
        return sums

    def copies_for(self, destination: int) -> tuple[Copy, ...]:
        """Returns the copies that destination rank `destination` pulls."""
        return self.copies[destination]

    def floor_s(self, speeds: LinkSpeeds | None = None) -> float | None:
        """Returns a lower bound in seconds for any transport: the busiest rank's bytes over its links, each kind and
        direction at the same time at full speed. None if parameters are in host memory, for which no speed is
        assumed."""
        speeds = speeds or LinkSpeeds()
        busy: dict[tuple[str, int, Kind], int] = defaultdict(int)
        for (source, destination), size in self.link_bytes.items():
            kind = self.link_kinds.get((source, destination), Kind.MEMORY)
            if kind is Kind.MEMORY:
                return None
            busy["reads", destination, kind] += size
            busy["sends", source, kind] += size
        return max((size / (getattr(speeds, kind) * 1e9) for (_, _, kind), size in busy.items()), default=0.0)

    def describe(self) -> str:
        """Returns copies and bytes per link and in total, one line per link, and the lower bound if it is known."""
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for destination, copies in enumerate(self.copies):
            for copy in copies:
                counts[copy.source, destination] += 1
        total = f"weight sync plan: {sum(counts.values())} copies, {self.total_bytes / 1e6:.3f} MB"
        if floor := self.floor_s():
            total += f", at least {floor * 1e3:.1f} ms"
        links = []
        for (source, destination), size in sorted(self.link_bytes.items()):
            kind = self.link_kinds.get((source, destination), Kind.MEMORY)
            count = counts[source, destination]
            links.append(
                f"  source {source} -> destination {destination} ({kind}): {count} copies, {size / 1e6:.3f} MB"
            )
        return "\n".join([total, *links])


def make_plan(
    sources: list[MemoryLayout],
    destinations: list[MemoryLayout],
    *,
    source_hosts: list[str],
    destination_hosts: list[str],
    source_devices: list[str] | None = None,
    destination_devices: list[str] | None = None,
) -> Plan:
    """Returns copies that write every element of every destination box once, from a source that holds it.

    Of several replicas one on the destination's device is read, else one on its host, else the one that has been read
    least so far.

    Args:
        source_hosts: host of each source rank.
        destination_hosts: host of each destination rank.
        source_devices: UUID of the GPU of each source rank, or `cpu`; None means that all are on the CPU.
        destination_devices: the same of each destination rank.

    Raises:
        WeightSyncFailed: the two sides disagree on a shape, or no source holds part of a destination box.
    """
    check_shapes(sources, destinations)
    here = list(zip(source_hosts, source_devices or ["cpu"] * len(sources), strict=True))
    there = list(zip(destination_hosts, destination_devices or ["cpu"] * len(destinations), strict=True))
    planner = _Planner(sources, here)
    copies = []
    link_bytes: dict[tuple[int, int], int] = defaultdict(int)
    itemsize = [{name: value.dtype.itemsize for name, value in layout.parameters.items()} for layout in sources]
    for rank, (layout, place) in enumerate(zip(destinations, there, strict=True)):
        mine = [copy for boxes in layout.boxes.values() for box in boxes for copy in planner.copies(box, place)]
        for copy in mine:
            link_bytes[copy.source, rank] += copy.rows * copy.cols * itemsize[copy.source][copy.read.parameter]
        copies.append(tuple(_merge(mine)))
    kinds = {(source, rank): _kind(here[source], there[rank]) for source, rank in link_bytes}
    return Plan(tuple(copies), dict(link_bytes), kinds)


def _kind(source: tuple[str, str], destination: tuple[str, str]) -> Kind:
    """Returns the medium between two (host, device)."""
    if source[0] != destination[0]:
        return Kind.NETWORK
    if "cpu" in (source[1], destination[1]):
        return Kind.MEMORY
    return Kind.DEVICE if source[1] == destination[1] else Kind.PEER


def check_shapes(sources: list[MemoryLayout], destinations: list[MemoryLayout]) -> None:
    """Raises WeightSyncFailed if two ranks recorded different shapes of a tensor that both know."""
    shapes: dict[str, tuple[int, ...]] = {}
    for side, layouts in (("source", sources), ("destination", destinations)):
        for rank, layout in enumerate(layouts):
            for name, shape in layout.tensors.items():
                if shapes.setdefault(name, shape) != shape:
                    raise WeightSyncFailed(
                        f"{name} has shape {list(shape)} on {side} rank {rank} and {list(shapes[name])} elsewhere"
                    )


def refine(tensor: str, sources: list[MemoryLayout], destinations: list[MemoryLayout]) -> list[Region]:
    """Returns the regions of `tensor` that are in one piece on both sides, in order. A difference is narrowed down to
    one of them."""
    mine, theirs = (
        {box.region for layout in side for box in layout.boxes.get(tensor, ())} for side in (sources, destinations)
    )
    return sorted({common for a in mine for b in theirs if (common := a.intersect(b))})


Holders = list[tuple[int, Box]]
"""Replicas of a region: source rank and position there."""


class _Planner:
    """Finds sources for destination boxes, and counts the load of each source."""

    def __init__(self, sources: list[MemoryLayout], places: list[tuple[str, str]]):
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
