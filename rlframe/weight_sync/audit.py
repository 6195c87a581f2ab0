"""Audits between two syncs: whether trainer and engines still hold the proved weights."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import (
    DestinationGroup,
    DestinationInfo,
    DestinationRank,
    Sent,
    SourceGroup,
    SourceRank,
)
from rlframe.weight_sync.connection import Connection

logger = logging.getLogger(__name__)
Digests = NDArray[np.uint64]


class Audit:
    """Remembers every rank's digests when they were proved, and compares them again.

    The ranks digest their own memory. Nothing is moved, and engines need not be paused, because weights change only in
    a sync.
    """

    def __init__(self) -> None:
        self._sent: Sequence[Sent] = ()
        self._rows: dict[int, Digests] = {}
        """Digests by destination rank."""
        self._snapshots: dict[int, dict[str, int]] = {}
        """Parameter digests by destination rank, of engines that take reloads."""

    def note(self, sent: Sequence[Sent], rows: Mapping[int, Digests]) -> None:
        """Remembers the proved digests of all source ranks, and of the destination ranks in `rows`."""
        self._sent = sent
        self._rows |= rows

    def admit(self, rows: Mapping[int, Digests]) -> None:
        """Remembers the proved digests of destination ranks that joined later."""
        self._rows |= rows

    def note_reloads(
        self, connection: Connection, destinations: DestinationGroup, engines: Sequence[int] | None
    ) -> None:
        """Remembers the parameters into which engines' own loaders have turned a proved reload."""
        ranks = connection.ranks_of(engines)
        taken = destinations.call(DestinationRank.snapshot, engines=engines)
        self._snapshots |= dict(zip(ranks, taken, strict=True))

    def forget(self, ranks: Sequence[int]) -> None:
        """Forgets destination ranks whose memory is new."""
        for rank in ranks:
            self._rows.pop(rank, None)
            self._snapshots.pop(rank, None)

    def check(self, connection: Connection, source: SourceGroup, destinations: DestinationGroup, version: int) -> None:
        """Compares every rank's present memory with its memory when `version` was proved.

        Raises:
            WeightSyncFailed: some memory has changed; the message names the tensor, the engine and the rank.
        """
        for rank, (before, now) in enumerate(zip(self._sent, source.call(SourceRank.digests), strict=True)):
            if (column := _first(before.held != now.held)) is not None:
                raise WeightSyncFailed(
                    f"source rank {rank} no longer holds version {version}: {connection.names[column]} "
                    "has changed in the trainer's memory since it was published, but not by training"
                )
        engines = sorted({connection.engines[rank] for rank in self._rows})
        ranks = connection.ranks_of(engines)
        if not ranks:
            return
        if connection.choice.reloads:
            changed = self._changed_parameters(ranks, destinations.call(DestinationRank.snapshot, engines=engines))
        else:
            rows = connection.stack(ranks, destinations.call(DestinationRank.digests, engines=engines))
            places = {rank: _first(rows[rank] != self._rows[rank]) for rank in ranks}
            changed = {rank: connection.names[column] for rank, column in places.items() if column is not None}
        for rank, name in changed.items():
            raise WeightSyncFailed(
                f"engine {connection.engines[rank]} no longer holds version {version}: {name} has changed in the "
                f"memory of destination rank {rank} since the sync that proved it"
            )

    def _changed_parameters(self, ranks: Sequence[int], taken: Sequence[Mapping[str, int]]) -> dict[int, str]:
        """Returns by rank the first of an engine's own parameters that has changed."""
        changed = {}
        for rank, now in zip(ranks, taken, strict=True):
            before = self._snapshots.get(rank, now)
            if name := next((name for name in before if now.get(name) != before[name]), None):
                changed[rank] = f"parameter {name}"
        return changed


def tell_unseen(infos: Sequence[DestinationInfo]) -> None:
    """Warns of parameters of engines that take reloads in which an audit would find no change."""
    if unseen := sorted({name for info in infos for name in info.unseen}):
        logger.warning(
            "audits leave out %d parameters of the engines, such as %s, which are packed elsewhere or in a number "
            "format without checksums; of these a sync proves only what was given to the engine's loader",
            len(unseen), unseen[0],
        )  # fmt: skip


def _first(differs: NDArray[np.bool_]) -> int | None:
    """Returns the first index that is true."""
    places = np.flatnonzero(differs)
    return int(places[0]) if places.size else None
