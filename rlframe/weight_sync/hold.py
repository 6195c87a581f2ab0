"""Hold: the published weights in host memory, from which an engine that was restarted receives them.

The trainer's ranks copy their weights after each sync. Other processes of the host map the copies, so that nothing is
asked of the ranks, which train meanwhile. The proof is that of every sync: the engine's digests must be those of the
published version.
"""

import logging
from collections.abc import Container, Sequence
from dataclasses import replace

from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationInfo, SourceGroup, SourceInfo, SourceRank
from rlframe.weight_sync.choice import Choice
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.connection import Connection, make_connection, make_links, pulls
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.transports.base import Link
from rlframe.weight_sync.transports.shm import SharedMemoryHandle

logger = logging.getLogger(__name__)
CARRIER = "shm"


class Hold:
    """The driver's account of the copies."""

    def __init__(self) -> None:
        self.version: int | None = None
        """The version that is held. None before the first, and while another one is copied."""
        self.num_bytes = 0
        """Bytes of host memory of all copies."""
        self.seconds = 0.0
        """Seconds of the slowest rank's last copy."""
        self._sources: list[SourceInfo] = []
        self._memories: tuple[SharedMemoryHandle, ...] = ()

    def prepare(
        self,
        sources: Sequence[SourceInfo],
        destinations: Sequence[DestinationInfo],
        engines: Sequence[int],
        wanted: Container[str],
    ) -> None:
        """Decides which rank holds what: everything that an engine holds, once.

        Args:
            engines: index of each destination rank's engine.
            wanted: tensors that some engine holds.

        Raises:
            WeightSyncFailed: an engine is on another host, where it cannot map the copies.
        """
        for rank, source in enumerate(sources):
            for engine, info in zip(engines, destinations, strict=True):
                if info.host != source.host:
                    raise WeightSyncFailed(
                        "weight_sync.hold=host is for engines on the host of the trainer's ranks, whose copies they "
                        f"map, but engine {engine} is on {info.host} and source rank {rank} on {source.host}; set "
                        "weight_sync.hold=none"
                    )
        layouts = owned([source.layout for source in sources], wanted)
        self._sources = [
            replace(source, layout=layout, device="cpu") for source, layout in zip(sources, layouts, strict=True)
        ]

    def take(self, source: SourceGroup, version: int) -> None:
        """Makes every rank copy the present weights, which are those of `version`."""
        first, self.version = not self._memories, None
        held = source.on_ranks([RankCall.of(SourceRank.hold, tuple(each.layout.parameters)) for each in self._sources])
        self._memories = tuple(each.memory for each in held)
        self.num_bytes, self.seconds = sum(each.num_bytes for each in held), max(each.seconds for each in held)
        self.version = version
        if first:
            logger.info(
                "weight_sync.hold=host: %d bytes of host memory hold the published weights, copied in %.3f s",
                self.num_bytes,
                self.seconds,
            )

    def forget(self) -> None:
        """Forgets the copies, because the processes that held them are gone."""
        self.version, self._memories = None, ()

    def links(
        self,
        destinations: list[DestinationInfo],
        ranks: Sequence[int],
        connection: Connection,
        config: WeightSyncConfig,
    ) -> list[Link]:
        """Returns what connects restarted engine ranks to the copies.

        Args:
            ranks: the destination rank of each.
            connection: that of trainer and engines, whose digests it must be possible to compare.

        Raises:
            WeightSyncFailed: an engine's memory has another layout than before.
        """
        engines = [connection.engines[rank] for rank in ranks]
        reloads = connection.choice.reloads
        for engine, rank, info in zip(engines, ranks, destinations, strict=True):
            if not reloads and info.layout != connection.destinations[rank]:
                raise WeightSyncFailed(
                    f"calibration after a restart: the memory of engine {engine} has another layout than before"
                )
        choice = Choice(CARRIER, reloads, "weight_sync.hold=host")
        own = make_connection(self._sources, destinations, engines, config, choice, seed=connection.seed)
        own = replace(own, units=connection.units)
        owners = [f"engine {engine}, destination rank {rank}" for engine, rank in zip(engines, ranks, strict=True)]
        return make_links(own, config, owners, pulls(own), memories=self._memories)


def owned(layouts: Sequence[MemoryLayout], wanted: Container[str]) -> list[MemoryLayout]:
    """Returns of each rank's layout the parameters with parts of `wanted` tensors that no rank before it holds."""
    seen: set[tuple[str, Region]] = set()
    found = []
    for layout in layouts:
        parts = [(box.parameter, (name, box.region)) for name, boxes in layout.boxes.items() for box in boxes]
        new = {parameter for parameter, part in parts if part[0] in wanted and part not in seen}
        seen |= {part for parameter, part in parts if parameter in new}
        boxes = {
            name: kept
            for name, mine in layout.boxes.items()
            if (kept := tuple(box for box in mine if box.parameter in new))
        }
        parameters = {name: value for name, value in layout.parameters.items() if name in new}
        found.append(replace(layout, boxes=boxes, parameters=parameters, padding=()))
    return found
