"""WeightSync: moves the policy's weights into the engines' memory, and proves that they arrived."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Region
from rlframe.weight_sync.endpoints import DestinationGroup, SourceGroup, WeightDestination, WeightSource
from rlframe.weight_sync.layout import Layout
from rlframe.weight_sync.plan import Plan, make_plan, refine
from rlframe.weight_sync.proof import Cover, cover, disagreement, total

__all__ = ["DestinationGroup", "SourceGroup", "SyncReport", "WeightDestination", "WeightSource", "WeightSync"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one publish did."""

    version: int
    num_bytes: int
    """Read from sources, over all destination ranks."""
    pull_s: float
    """Seconds until the last rank had its pieces."""
    verify_s: float
    """Seconds of digests on both sides, at the same time, and their comparison."""
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Connection:
    """What is worked out once per set of processes."""

    plan: Plan
    sources: list[Layout]
    destinations: list[Layout]
    source_cover: Cover
    engine_covers: dict[int, Cover]
    """By engine number."""
    dtypes: dict[str, torch.dtype]
    """Number format of each tensor in the engines."""


class WeightSync:
    """Owns the policy version. Order of calls: `connect`, `calibrate`, then `publish` after every update.

    Example:
        >>> sync = WeightSync(policy, rollout)
        >>> sync.connect()
        >>> sync.calibrate(version=0)
        >>> sync.publish(version=1).pull_s
    """

    def __init__(self, source: SourceGroup, destinations: DestinationGroup, transport: str = "shm"):
        self._source, self._destinations, self._transport = source, destinations, transport
        self._connection: _Connection | None = None
        self._version: int | None = None
        self._totals: dict[str, int] = {}
        """Digest of each tensor at `policy_version`."""

    @property
    def policy_version(self) -> int | None:
        """The version every engine is proved to hold; None before calibration."""
        return self._version

    def connect(self) -> Plan:
        """Makes the plan and opens the sources' memory on the destinations. To repeat when a process was replaced.

        Raises:
            WeightSyncFailed: shapes disagree, or some element of an engine has no source.
        """
        sources, destinations = self._source.layouts(), self._destinations.layouts()
        plan = make_plan(
            sources,
            destinations,
            source_hosts=self._source.hosts(),
            destination_hosts=self._destinations.hosts(),
        )
        engines: dict[int, dict[int, Layout]] = {}
        for rank, engine in enumerate(self._destinations.engines()):
            engines.setdefault(engine, {})[rank] = destinations[rank]
        self._connection = _Connection(
            plan=plan,
            sources=sources,
            destinations=destinations,
            source_cover=cover(dict(enumerate(sources)), side="the trainer"),
            engine_covers={engine: cover(ranks, side=f"engine {engine}") for engine, ranks in engines.items()},
            dtypes=_dtypes(destinations),
        )
        self._version, self._totals = None, {}
        logger.info("%s", plan.describe())
        self._destinations.connect(plan.copies, self._source.memories(self._transport), self._transport)
        return plan

    def calibrate(self, version: int) -> None:
        """Proves the recordings: both sides have just loaded the same checkpoint, each by its own full path, so what
        they hold at the recorded places must be equal without a copy. Engines may sample from then on.

        Raises:
            WeightSyncFailed: a tensor differs, so that at least one recording is not where the weights are.
        """
        self._destinations.begin(version)
        try:
            self._totals = self._verify(version)
        except WeightSyncFailed as error:
            raise WeightSyncFailed(
                f"calibration: {error}. Both sides loaded the same checkpoint, so the engine does not keep this tensor "
                "where its loader put it (weights repacked after loading?), or the checkpoints are not the same"
            ) from error
        self._destinations.commit(version)
        self._version = version

    def publish(self, version: int) -> SyncReport:
        """Copies the policy's present weights into every engine as `version`, proves it, and lets them sample.

        Raises:
            WeightSyncFailed: not calibrated, `version` is not newer, replicas of the trainer differ, or an engine does
                not hold what was published. The engines then stay unverified and refuse to sample.
        """
        if self._version is None:
            raise WeightSyncFailed(f"version {version} cannot be published before calibrate has proved the recordings")
        if version <= self._version:
            raise WeightSyncFailed(f"version {version} is not newer than version {self._version}, which is published")
        start = time.perf_counter()
        self._destinations.begin(version)
        self._destinations.pull()
        pulled = time.perf_counter()
        self._totals = self._verify(version)
        verified = time.perf_counter()
        self._destinations.commit(version)
        self._version = version
        return SyncReport(
            version=version,
            num_bytes=self._connected.plan.total_bytes,
            pull_s=pulled - start,
            verify_s=verified - pulled,
            total_s=time.perf_counter() - start,
        )

    @property
    def _connected(self) -> _Connection:
        assert self._connection is not None, "connect before calibrate and publish"
        return self._connection

    def _verify(self, version: int) -> dict[str, int]:
        """Digest of each tensor, after all engines have been found to hold it."""
        connection = self._connected
        with ThreadPoolExecutor(max_workers=1) as pool:
            engine_digests = pool.submit(self._destinations.digests)
            source_shares = _by_tensor(self._source.digests(connection.dtypes))
            engine_shares = _by_tensor(engine_digests.result())
        totals = {}
        for tensor in connection.dtypes:
            holders = connection.source_cover[tensor]
            if ranks := disagreement(holders, source_shares[tensor]):
                raise WeightSyncFailed(
                    f"version {version}: source ranks {ranks[0]} and {ranks[1]} hold the same part of {tensor} with "
                    "different contents: the trainer's replicas have drifted apart"
                )
            totals[tensor] = total(holders, source_shares[tensor])
        for engine, covers in connection.engine_covers.items():
            for tensor, holders in covers.items():
                shares = engine_shares[tensor]
                if disagreement(holders, shares) or total(holders, shares) != totals[tensor]:
                    raise WeightSyncFailed(self._explain(engine, tensor, version, total(holders, shares)))
        return totals

    def _explain(self, engine: int, tensor: str, version: int, found: int) -> str:
        """Why `engine` does not hold `tensor` as published, down to the first box that differs."""
        connection = self._connected
        ranks = sorted({rank for holders in connection.source_cover[tensor].values() for rank in holders})
        regions = refine(tensor, connection.sources, connection.destinations)
        expected = _first_values(self._source.box_digests(tensor, regions, connection.dtypes[tensor]))
        mine = [rank for rank, number in enumerate(self._destinations.engines()) if number == engine]
        actual = self._destinations.box_digests(tensor, regions)
        if self._version is not None and found == self._totals.get(tensor):
            text = f"engine {engine} still holds version {self._version}: {tensor} of version {version} did not arrive"
        else:
            text = f"engine {engine} does not hold version {version}: {tensor} differs"
        for region in regions:
            for rank in mine:
                if region in actual[rank] and actual[rank][region] != expected.get(region):
                    text += (
                        f"; first at rows {region.row}..{region.row + region.rows - 1}, columns "
                        f"{region.col}..{region.col + region.cols - 1} on destination rank {rank}"
                    )
                    return f"{text} (source ranks {', '.join(map(str, ranks))})"
        return f"{text} (source ranks {', '.join(map(str, ranks))})"


def _dtypes(destinations: list[Layout]) -> dict[str, torch.dtype]:
    """Number format of each tensor in the engines, which must be one: the trainer casts once for all of them."""
    dtypes: dict[str, torch.dtype] = {}
    for rank, layout in enumerate(destinations):
        for tensor in layout.boxes:
            dtype = layout.dtype(tensor)
            if dtypes.setdefault(tensor, dtype) != dtype:
                raise WeightSyncFailed(
                    f"destination rank {rank} holds {tensor} as {dtype}, another as {dtypes[tensor]}"
                )
    return dtypes


def _by_tensor(digests: list[dict[str, int]]) -> dict[str, dict[int, int]]:
    """Digest share by tensor and rank."""
    shares: dict[str, dict[int, int]] = {}
    for rank, of_rank in enumerate(digests):
        for tensor, value in of_rank.items():
            shares.setdefault(tensor, {})[rank] = value
    return shares


def _first_values(digests: list[dict[Region, int]]) -> Mapping[Region, int]:
    """Digest by region, from the first rank that holds it; replicas have been found equal before."""
    return {region: value for of_rank in reversed(digests) for region, value in of_rank.items()}
