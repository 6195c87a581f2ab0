"""The plan of a sync: the copies that carry every source piece to its place. Pure data, made once per connection."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.plan.copies import COLUMN, Copies
from rlframe.weight_sync.plan.piecewise import plan_piecewise
from rlframe.weight_sync.plan.tables import plan_tables

MOST_LINKS = 64
"""Links that `Plan.describe` lists one by one."""


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

    copies: tuple[Copies, ...]
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

    def copies_for(self, destination: int) -> Copies:
        """Returns the copies that destination rank `destination` pulls."""
        return self.copies[destination]

    def floor_s(self, speeds: LinkSpeeds | None = None) -> float | None:
        """Returns a lower bound in seconds for any transport: the busiest rank's bytes over its links, each kind and
        direction at the same time at full speed. None if parameters are in host memory, for which no speed is
        assumed."""
        if Kind.MEMORY in self.kind_bytes:
            return None
        return max((seconds for _, seconds in self.busiest(speeds).values()), default=0.0)

    def busiest(self, speeds: LinkSpeeds | None = None) -> dict[Kind, tuple[int, float]]:
        """Returns by medium, except host memory, the bytes that the busiest rank sends or reads over it, and their
        seconds at full speed."""
        speeds = speeds or LinkSpeeds()
        busy: dict[tuple[Kind, str, int], int] = defaultdict(int)
        for (source, destination), size in self.link_bytes.items():
            kind = self.link_kinds.get((source, destination), Kind.MEMORY)
            busy[kind, "reads", destination] += size
            busy[kind, "sends", source] += size
        most: dict[Kind, int] = {}
        for (kind, _, _), size in sorted(busy.items()):
            if kind is not Kind.MEMORY:
                most[kind] = max(size, most.get(kind, 0))
        return {kind: (size, size / (getattr(speeds, kind) * 1e9)) for kind, size in most.items()}

    def describe(self) -> str:
        """Returns copies and bytes in total and per link, one line per link, and the lower bound if it is known. Of
        more than MOST_LINKS links it gives the sums by medium."""
        total = f"weight sync plan: {self.num_copies} copies, {self.total_bytes / 1e6:.3f} MB"
        if floor := self.floor_s():
            total += f", at least {floor * 1e3:.1f} ms"
        counts: dict[tuple[int, int], int] = {}
        for destination, copies in enumerate(self.copies):
            sources, lengths = np.unique(copies.column("source"), return_counts=True)
            counts |= {(source, destination): n for source, n in zip(sources.tolist(), lengths.tolist(), strict=True)}
        if len(counts) > MOST_LINKS:
            return "\n".join([total, *(f"  {kind}: {size / 1e6:.3f} MB" for kind, size in self.kind_bytes.items())])
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
    copies = plan_tables(sources, destinations, here, there)
    if copies is None:
        copies = plan_piecewise(sources, destinations, here, there)
    link_bytes: dict[tuple[int, int], int] = {}
    itemsize = [{name: value.dtype.itemsize for name, value in layout.parameters.items()} for layout in sources]
    for rank, mine in enumerate(copies):
        size = mine.column("rows") * mine.column("cols") * _itemsizes(mine, itemsize)
        for source in mine.sources:
            link_bytes[source, rank] = int(size[mine.column("source") == source].sum())
    kinds = {(source, rank): _kind(here[source], there[rank]) for source, rank in link_bytes}
    return Plan(tuple(copies), link_bytes, kinds)


def _itemsizes(copies: Copies, itemsize: Sequence[Mapping[str, int]]) -> NDArray[np.int64]:
    """Returns [copies] bytes of an element in the memory that each copy reads."""
    pairs, inverse = np.unique(
        copies.table[:, [COLUMN["source"], COLUMN["read_parameter"]]], axis=0, return_inverse=True
    )
    sizes = [itemsize[source][copies.read_parameters[parameter]] for source, parameter in pairs.tolist()]
    return np.array(sizes, dtype=np.int64)[inverse.reshape(-1)]


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
    seen: set[int] = set()
    for side, layouts in (("source", sources), ("destination", destinations)):
        for rank, layout in enumerate(layouts):
            if id(layout) in seen:
                continue
            seen.add(id(layout))
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
