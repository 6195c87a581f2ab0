"""WeightSync: moves the policy's weights into the engines' memory, and proves that they arrived."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlframe.utils.errors import RlframeError, WeightSyncFailed, WorkerDied
from rlframe.weight_sync.audit import Audit
from rlframe.weight_sync.border import (
    DestinationGroup,
    DestinationInfo,
    DestinationRank,
    Received,
    Sent,
    SourceGroup,
    SourceRank,
)
from rlframe.weight_sync.choice import Choice
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.connection import Connection, Rendezvous, both, make_connection, open_connection
from rlframe.weight_sync.endpoints import Reload, WeightDestination, WeightSource
from rlframe.weight_sync.failure import account, explain
from rlframe.weight_sync.plan.planner import Plan
from rlframe.weight_sync.transports.base import find_transport

__all__ = [
    "DestinationGroup",
    "Received",
    "Reload",
    "SourceGroup",
    "SyncReport",
    "WeightDestination",
    "WeightSource",
    "WeightSync",
    "WeightSyncConfig",
]

logger = logging.getLogger(__name__)

Digests = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one publish did."""

    version: int
    transport: str
    """Such as `shm`, or `reload over nccl`."""
    num_bytes: int
    """Read from sources, over all destination ranks."""
    pause_s: float
    """Seconds from the closing of the first engine's gate until all were open again: engines could not sample."""
    pull_s: float
    """Seconds of the slowest rank until it had its pieces."""
    verify_s: float
    """Seconds of the slowest rank's digests, and their comparison."""
    total_s: float


class WeightSync:
    """Owns the policy version. Order of calls: `connect`, `calibrate`, then `publish` after every update.

    Example:
        >>> sync = WeightSync(policy, rollout, WeightSyncConfig())
        >>> sync.connect()
        >>> sync.calibrate(version=0)
        >>> sync.publish(version=1).pull_s
    """

    def __init__(self, source: SourceGroup, destinations: DestinationGroup, config: WeightSyncConfig | None = None):
        self._source, self._destinations, self._config = source, destinations, config or WeightSyncConfig()
        self._meeting = Rendezvous()
        # Drawn anew, so that no fault can have been made to fit it.
        self._seed = secrets.randbits(64)
        self._connection: Connection | None = None
        self._infos: list[DestinationInfo] = []
        self._is_open = False
        """False after a failure, which may have broken a two-sided transport's group."""
        self._audit = Audit()
        self._audit_asked = False
        self.audit_s = 0.0
        """Seconds that the last audit took."""
        self._version: int | None = None
        self._totals: Digests | None = None
        """[names] digest of each tensor at `policy_version`."""
        self._initial: Digests | None = None
        """[names] digest of each tensor of the checkpoint that trainer and engines started from."""

    @property
    def policy_version(self) -> int | None:
        """The version every engine is proved to hold; None before calibration."""
        return self._version

    @property
    def choice(self) -> Choice:
        """The transport in use, with the reason."""
        return self._connected.choice

    @property
    def plan(self) -> Plan:
        """The copies of every sync."""
        return self._connected.plan

    def connect(self) -> Plan:
        """Chooses the transport, makes the plan and opens the ways between all ranks.

        Raises:
            WeightSyncFailed: the transport asked for cannot work, shapes disagree, or some element of an engine has no
                source.
        """
        self._version = self._totals = self._initial = None
        self._audit = Audit()
        self._reconnect()
        return self.plan

    def calibrate(self, version: int) -> None:
        """Proves the recordings: both sides have just loaded the same checkpoint, each by its own full path, so what
        they hold at the recorded places must be equal without a copy. Engines may sample from then on.

        For a reload nothing is recorded: `version` is reloaded, and what the loaders got is proved.

        Raises:
            WeightSyncFailed: a tensor differs, so that at least one recording is not where the weights are.
        """
        if self._connected.choice.reloads:
            self._deliver(version)
        else:
            try:
                with self._gates(version):
                    sent, held = both(
                        lambda: self._source.call(SourceRank.digests),
                        lambda: self._destinations.call(DestinationRank.digests),
                        self._meeting,
                    )
                    self._totals = self._prove(version, sent, held)
            except WeightSyncFailed as error:
                able = all(info.can_reload for info in self._infos)
                way_out = "; weight_sync.transport=reload goes through the engine's own loader instead" if able else ""
                raise WeightSyncFailed(
                    f"calibration: {error}. Both sides loaded the same checkpoint, so the engine does not keep this "
                    "tensor where its loader put it (weights repacked after loading?), or the trainer's recording is "
                    f"wrong, or the checkpoints are not the same{way_out}"
                ) from error
        self._destinations.commit(version)
        self._version, self._initial = version, self._totals

    def publish(self, version: int) -> SyncReport:
        """Copies the policy's present weights into every engine as `version`, proves it, and lets them sample.

        Raises:
            WeightSyncFailed: not calibrated, `version` is not newer, replicas of the trainer differ, or an engine does
                not hold what was published. The engines then stay unverified and refuse to sample, and the text says
                which version each of them holds.
            WorkerDied: a process ended in the middle and could not be replaced; with the same account of the engines.
        """
        if self._version is None:
            raise WeightSyncFailed(f"version {version} cannot be published before calibrate has proved the recordings")
        if version <= self._version:
            raise WeightSyncFailed(f"version {version} is not newer than version {self._version}, which is published")
        start = time.perf_counter()
        if not self._is_open:
            self._reconnect(self._connected.choice)
        closed = time.perf_counter()
        try:
            received, compare_s = self._deliver(version)
        except WorkerDied as error:
            engines = self._destinations.revive()
            if not engines:
                raise
            logger.warning("engines %s were started anew: %s", ", ".join(map(str, engines)), error)
            self._admit(engines)
            received, compare_s = self._deliver(version)
        self._destinations.commit(version)
        self._version = version
        end = time.perf_counter()
        return SyncReport(
            version=version,
            transport=self._connected.choice.name,
            num_bytes=self._connected.plan.total_bytes,
            pause_s=end - closed,
            pull_s=max(rank.pull_s for rank in received),
            verify_s=max(rank.verify_s for rank in received) + compare_s,
            total_s=end - start,
        )

    def restore(self) -> None:
        """Gives every engine the present version again, after its memory was lost (a deep sleep), and proves it.

        Raises:
            WeightSyncFailed: an engine does not hold it, or the trainer has moved on meanwhile.
        """
        assert self._version is not None, "calibrate before restore"
        self._again(None)

    def rejoin(self, engines: Sequence[int]) -> None:
        """Takes in engines that were restarted. They hold the initial checkpoint, which is proved against the digests
        that `calibrate` remembered; then they are given the present version, and that is proved too.

        When the trainer has been trained on meanwhile, no one holds the present version to give: the engines then stay
        shut until the next `publish`.

        Raises:
            WeightSyncFailed: an engine does not hold the initial checkpoint where its loader was recorded.
        """
        assert self._version is not None, "calibrate before rejoin"
        self._admit(engines)
        connection = self._connected
        if self._moved_on(connection.source_totals(self._source.call(SourceRank.digests))):
            self._destinations.fail("restarted, and waits for the next version", engines=engines)
            return
        # The ranks of a two-sided transport can only move together.
        self._again(None if find_transport(connection.choice.carrier).two_sided else engines)

    def audit(self) -> None:
        """Proves once more, from their own memory, that trainer and engines hold the present version. To be called
        between a publish and the next update, when engines are awake.

        Raises:
            WeightSyncFailed: some memory has changed since it was proved; names the tensor, the engine and the rank.
                The engines then refuse to sample.
        """
        assert self._version is not None, "calibrate before audit"
        start = time.perf_counter()
        try:
            self._audit.check(self._connected, self._source, self._destinations, self._version)
        except WeightSyncFailed as error:
            self._destinations.fail(f"the audit of version {self._version} failed: {error}")
            raise
        self.audit_s = time.perf_counter() - start

    def ask_for_audit(self) -> None:
        """Has the next `audit_if_due` be due, and say what it came to."""
        self._audit_asked = True

    def audit_if_due(self) -> None:
        """Audits the versions that `weight_sync.audit_every_steps` or somebody asks for."""
        every = self._config.audit_every_steps
        due = every and self._version is not None and self._version % every == 0
        asked, self._audit_asked = self._audit_asked, False
        if due or asked:
            self.audit()
        if asked:
            logger.info("audited: trainer and engines hold version %s as it was proved", self._version)

    def reattach(self, version: int) -> None:
        """Takes in a trainer whose ranks were all started anew, while the engines went on. The ranks hold the initial
        checkpoint, which is proved against the digests that `calibrate` remembered; then every engine is given it as
        `version`, which may be older than the one it had.

        Raises:
            WeightSyncFailed: the trainer does not hold the initial checkpoint, or an engine not what it was given.
        """
        self._admit(self._destinations.revive())
        connection = self._connected
        totals = connection.source_totals(self._source.call(SourceRank.digests))
        if changed := np.flatnonzero(totals != self._initial).tolist():
            raise WeightSyncFailed(
                f"calibration after a restart: the trainer does not hold the initial checkpoint: "
                f"{connection.names[changed[0]]} differs, {len(changed)} tensors in all; did the files of the model "
                "change during the run?"
            )
        self._deliver(version)
        self._destinations.commit(version)
        self._version = version

    def close(self) -> None:
        """Both sides let go of each other's memory, or leave their common group. `connect` begins anew."""
        both(
            lambda: self._source.call(SourceRank.close),
            lambda: self._destinations.call(DestinationRank.close),
            self._meeting,
        )
        self._is_open = False

    def _admit(self, engines: Sequence[int]) -> None:
        """Connects engines that were restarted, and proves that they hold the initial checkpoint."""
        assert self._initial is not None, "calibrate before engines are restarted"
        self._reconnect(self._connected.choice)
        connection = self._connected
        ranks = connection.ranks_of(engines)
        self._audit.forget(ranks)
        if not connection.choice.reloads:
            held = connection.stack(ranks, self._destinations.call(DestinationRank.digests, engines=engines))
            for engine in engines:
                if names := connection.differing(engine, held, self._initial):
                    reason = (
                        f"calibration after a restart: engine {engine} does not hold the initial checkpoint where its "
                        f"loader put it: {names[0]} differs, {len(names)} tensors in all"
                    )
                    self._destinations.fail(reason, engines=engines)
                    raise WeightSyncFailed(reason)

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None, "connect before calibrate and publish"
        return self._connection

    def _reconnect(self, choice: Choice | None = None) -> None:
        """Plans for the processes as they are now, and opens the ways between them."""
        self._is_open = False
        sources, self._infos = both(
            lambda: self._source.call(SourceRank.describe),
            lambda: self._destinations.call(DestinationRank.describe),
            self._meeting,
        )
        engines = self._destinations.engines()
        self._connection = make_connection(sources, self._infos, engines, self._config, choice, seed=self._seed)
        logger.info("%s", self._connection.choice)
        logger.info("%s", self._connection.plan.describe())
        open_connection(self._connection, self._source, self._destinations, self._config, self._meeting)
        self._is_open = True

    def _again(self, engines: Sequence[int] | None) -> None:
        """The present version once more, which the trainer must still hold."""
        assert self._version is not None
        self._deliver(self._version, engines=engines, again=True)
        self._destinations.commit(self._version, engines=engines)

    def _moved_on(self, totals: Digests) -> bool:
        """Returns whether these digests of the trainer's weights are not those of the present version."""
        # 0 on both sides for what no engine holds.
        return bool((totals != self._totals).any())

    def _deliver(
        self, version: int, *, engines: Sequence[int] | None = None, again: bool = False
    ) -> tuple[list[Received], float]:
        """Returns (what the ranks received, seconds of comparison). One round of calls, then the proof."""
        if not self._is_open:
            self._reconnect(self._connected.choice)
        with self._gates(version, engines):
            sent, received = both(
                lambda: self._source.call(SourceRank.send),
                lambda: self._destinations.receive(version, engines=engines),
                self._meeting,
            )
            start = time.perf_counter()
            totals = self._prove(version, sent, [rank.digests for rank in received], engines, again)
            compare_s = time.perf_counter() - start
        self._totals = totals
        return received, compare_s

    def _prove(
        self,
        version: int,
        sent: list[Sent],
        held: list[Digests],
        engines: Sequence[int] | None = None,
        again: bool = False,
    ) -> Digests:
        """Returns [names] digest of each tensor, after all engines have been found to hold it."""
        connection = self._connected
        if drift := connection.source_shares.first_drift(np.stack([each.held for each in sent])):
            column, rank, replica = drift
            raise WeightSyncFailed(
                f"version {version}: source ranks {rank} and {replica} hold the same part of "
                f"{connection.names[column]} with different contents: the trainer's replicas have drifted apart"
            )
        totals = connection.source_totals(sent)
        if again and self._moved_on(totals):
            raise WeightSyncFailed(
                f"version {version} cannot be given to an engine again: the trainer's weights have changed since"
            )
        rows = connection.stack(connection.ranks_of(engines), held)
        for engine in connection.engine_shares:
            if (engines is None or engine in engines) and (names := connection.differing(engine, rows, totals)):
                known = None if self._version is None else (self._version, self._totals)
                raise WeightSyncFailed(
                    explain(
                        connection, self._source, self._destinations, engine, names[0], version, rows=rows, known=known
                    )
                )
        self._audit.note(sent, rows)
        if connection.choice.reloads and self._config.audit_every_steps:
            self._audit.note_reloads(connection, self._destinations, engines)
        return totals

    @contextmanager
    def _gates(self, version: int, engines: Sequence[int] | None = None) -> Iterator[None]:
        """When the block fails, the engines stay shut, and the error says what each of them holds."""
        try:
            yield
        except BaseException as error:
            # Whatever it was, no engine may sample what is not proved.
            self._is_open = False
            self._destinations.fail(f"the sync of version {version} failed: {error}", engines=engines)
            if not isinstance(error, RlframeError) or self._version is None or self._totals is None:
                raise
            text = account(
                self._connected,
                self._source,
                self._destinations,
                old=(self._version, self._totals),
                new=version,
                engines=engines,
            )
            raise type(error)(f"{error}. {text}") from error
