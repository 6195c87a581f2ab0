"""WeightSync: moves the policy's weights into the engines' memory, and proves that they arrived."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from rlframe.utils.calls import RankCall
from rlframe.utils.errors import RlframeError, WeightSyncFailed, WorkerDied
from rlframe.weight_sync.audit import Audit, tell_unseen
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
from rlframe.weight_sync.config import HoldIn, WeightSyncConfig
from rlframe.weight_sync.connection import Connection, Rendezvous, both, make_connection, open_connection
from rlframe.weight_sync.endpoints import Reload, WeightDestination, WeightSource
from rlframe.weight_sync.failure import account, explain
from rlframe.weight_sync.hold import Hold
from rlframe.weight_sync.plan.planner import Plan
from rlframe.weight_sync.report import SyncReport
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


class WeightSync:
    """Owns the policy version. Must be used in the order `connect`, `calibrate`, then `publish` after every update.

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
        self._hold = Hold() if self._config.hold is HoldIn.HOST else None
        self.audit_s = 0.0
        """Seconds of the last audit."""
        self._version: int | None = None
        self._totals: Digests | None = None
        """[names] digest of each tensor at `policy_version`."""
        self._initial: Digests | None = None
        """[names] digest of each tensor of the checkpoint from which trainer and engines started."""

    @property
    def policy_version(self) -> int | None:
        """The version that every engine is proved to hold. None before calibration."""
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
        """Chooses the transport, makes the plan and connects all ranks.

        Raises:
            WeightSyncFailed: the requested transport is unavailable, shapes disagree, or some element of an engine has
                no source.
        """
        self._version = self._totals = self._initial = None
        self._audit = Audit()
        self._reconnect()
        if self._connected.choice.reloads and self._config.audit_every_steps:
            tell_unseen(self._infos)
        return self.plan

    def calibrate(self, version: int) -> None:
        """Proves the recordings. Both sides have just loaded the same checkpoint, each by its own full path, so their
        memory at the recorded places must be equal without a copy. Engines may sample afterwards.

        For a reload nothing is recorded: `version` is reloaded, and the tensors passed to the loaders are proved.

        Raises:
            WeightSyncFailed: a tensor differs, so that at least one recording is wrong.
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
                way_out = "; set weight_sync.transport=reload to use the engine's own loader" if able else ""
                raise WeightSyncFailed(
                    f"calibration: {error}. Both sides loaded the same checkpoint, so either the engine "
                    "moved this tensor after loading it (weights repacked?), or the trainer's recording "
                    f"is wrong, or the checkpoints differ{way_out}"
                ) from error
        self._destinations.commit(version)
        self._version, self._initial = version, self._totals
        self._keep()

    def publish(self, version: int) -> SyncReport:
        """Copies the policy's present weights into every engine as `version`, proves them, and lets the engines sample.

        Raises:
            WeightSyncFailed: not calibrated, `version` is not newer, replicas of the trainer differ, or an engine does
                not hold what was published. The engines then stay unverified and refuse to sample, and the message
                names the version that each of them holds.
            WorkerDied: a process ended during the sync and could not be replaced; the message also names each engine's
                version.
        """
        if self._version is None:
            raise WeightSyncFailed(f"version {version} cannot be published before calibrate has proved the recordings")
        if version <= self._version:
            raise WeightSyncFailed(f"version {version} must be newer than the published version {self._version}")
        start = time.perf_counter()
        received, compare_s, closed = self._bring(version)
        self._version = version
        end = time.perf_counter()
        # Engines sample on meanwhile.
        self._keep()
        return SyncReport(
            version=version,
            transport=self._connected.choice.name,
            num_bytes=self._connected.plan.total_bytes,
            pause_s=end - closed,
            pull_s=max(rank.pull_s for rank in received),
            verify_s=max(rank.verify_s for rank in received) + compare_s,
            total_s=end - start,
        )

    def overwrite(self, version: int) -> None:
        """Sends the trainer's weights to every engine as `version`, whatever the engines hold, and proves them. Unlike
        `publish` it needs no calibration, so it may follow one that has failed.

        Raises:
            WeightSyncFailed: an engine does not hold what was sent.
        """
        self._deliver(version)
        self._destinations.commit(version)
        self._version = version
        self._keep()

    def restore(self) -> None:
        """Sends the present version to every engine again, after a deep sleep has dropped its memory, and proves it.

        Raises:
            WeightSyncFailed: an engine does not hold it, or the trainer's weights have changed since.
        """
        assert self._version is not None, "calibrate before restore"
        self._again(None)

    def rejoin(self, engines: Sequence[int]) -> bool:
        """Admits restarted engines. They hold the initial checkpoint, which is proved against the digests that
        `calibrate` remembered; then they receive the present version, which is proved too. With `weight_sync.hold` it
        comes from the copy that is held, and nothing is asked of the trainer, which may be training.

        Otherwise, if the trainer has been trained since, nobody can send the present version: the engines then stay
        shut until the next `publish`.

        Returns:
            Whether the engines hold the present version.

        Raises:
            WeightSyncFailed: an engine does not hold the initial checkpoint at the recorded places.
        """
        assert self._version is not None, "calibrate before rejoin"
        if self._hold and self._hold.version == self._version:
            self._rejoin_from(self._hold, engines)
            return True
        self._admit(engines)
        connection = self._connected
        if self._moved_on(connection.source_totals(self._source.call(SourceRank.digests))):
            self._destinations.fail("restarted and waiting for the next version", engines=engines)
            return False
        # The ranks of a two-sided transport can only move together.
        self._again(None if find_transport(connection.choice.carrier).two_sided else engines)
        return True

    def audit(self) -> None:
        """Proves again, from their own memory, that trainer and engines hold the present version. Must be called
        between a publish and the next update, while engines are awake.

        Raises:
            WeightSyncFailed: some memory has changed since it was proved; the message names the tensor, the engine and
                the rank. The engines then refuse to sample.
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
        """Makes the next `audit_if_due` run and log its result."""
        self._audit_asked = True

    def audit_if_due(self) -> None:
        """Runs the audits that `weight_sync.audit_every_steps` or a user requests."""
        every = self._config.audit_every_steps
        due = every and self._version is not None and self._version % every == 0
        asked, self._audit_asked = self._audit_asked, False
        if due or asked:
            self.audit()
        if asked and self._connected.choice.reloads and not every:
            logger.info("audited: the trainer holds version %s; weight_sync.audit_every_steps=0 leaves engines out "
                        "that take reloads", self._version)  # fmt: skip
        elif asked:
            logger.info("audited: trainer and engines hold version %s as it was proved", self._version)

    def reattach(self, version: int) -> None:
        """Admits a trainer whose ranks were all restarted while the engines continued. The ranks hold the initial
        checkpoint, which is proved against the digests that `calibrate` remembered. Then every engine receives it as
        `version`, which may be older than the engine's.

        Raises:
            WeightSyncFailed: the trainer does not hold the initial checkpoint, or an engine does not hold the sent
                weights.
        """
        if self._hold:
            self._hold.forget()
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
        self._keep()

    @property
    def hold_metrics(self) -> dict[str, float]:
        """Returns the cost of holding the published weights, if they are held."""
        if self._hold is None:
            return {}
        return {
            "memory/weight_sync_held_bytes": float(self._hold.num_bytes),
            "time/weight_sync_hold_s": self._hold.seconds,
        }

    def close(self) -> None:
        """Releases the memory of both sides, or leaves their common group. `connect` starts again."""
        both(
            lambda: self._source.call(SourceRank.close),
            lambda: self._destinations.call(DestinationRank.close),
            self._meeting,
        )
        self._is_open = False

    def _admit(self, engines: Sequence[int]) -> None:
        """Connects restarted engines, and proves that they hold the initial checkpoint, unless weights were sent to
        them since."""
        assert self._initial is not None, "calibrate before engines are restarted"
        self._reconnect(self._connected.choice)
        ranks = self._connected.ranks_of(engines)
        self._audit.forget(ranks)
        self._require_initial(self._untouched(ranks, [self._infos[rank] for rank in ranks]))

    def _untouched(self, ranks: Sequence[int], infos: Sequence[DestinationInfo]) -> list[int]:
        """Returns the engines of these ranks to which nothing was sent. Others were proved before, in an attempt that
        the death of another engine ended."""
        sent = {self._connected.engines[rank] for rank, info in zip(ranks, infos, strict=True) if info.received}
        return sorted({self._connected.engines[rank] for rank in ranks} - sent)

    def _require_initial(self, engines: Sequence[int]) -> None:
        """Proves that connected engines that were restarted hold the initial checkpoint, unless they take reloads."""
        connection = self._connected
        if connection.choice.reloads:
            return
        assert self._initial is not None
        held = connection.stack(
            connection.ranks_of(engines), self._destinations.call(DestinationRank.digests, engines=engines)
        )
        for engine in engines:
            if names := connection.differing(engine, held, self._initial):
                reason = (
                    f"calibration after a restart: engine {engine} does not hold the initial checkpoint where its "
                    f"loader put it: {names[0]} differs, {len(names)} tensors in all"
                )
                self._destinations.fail(reason, engines=engines)
                raise WeightSyncFailed(reason)

    def _keep(self) -> None:
        """Has the published weights held, if that is set."""
        if self._hold:
            assert self._version is not None, "published before they are held"
            self._hold.take(self._source, self._version)

    def _rejoin_from(self, hold: Hold, engines: Sequence[int]) -> None:
        """Connects restarted engines to the copies that are held, proves that they hold the initial checkpoint, then
        sends and proves the present version. Calls nothing of the trainer."""
        connection, version = self._connected, self._version
        assert version is not None and self._totals is not None
        ranks = connection.ranks_of(engines)
        # The trainer's end still knows the processes before them.
        self._is_open = False
        self._audit.forget(ranks)
        infos = self._destinations.call(DestinationRank.describe, engines=engines)
        links = hold.links(infos, ranks, connection, self._config)
        self._destinations.on_ranks([RankCall.of(DestinationRank.connect, link) for link in links], engines=engines)
        self._require_initial(self._untouched(ranks, infos))
        try:
            received = self._destinations.receive(version, engines=engines)
            rows = connection.stack(ranks, [rank.digests for rank in received])
            for engine in engines:
                if names := connection.differing(engine, rows, self._totals):
                    raise WeightSyncFailed(
                        f"engine {engine} does not hold version {version} after a restart: {names[0]} differs, "
                        f"{len(names)} tensors in all, in the copy that weight_sync.hold keeps or on the way from it"
                    )
        except BaseException as error:
            # As in every sync: nobody samples with weights that are not proved.
            self._destinations.fail(f"the weights that are held did not arrive: {error}", engines=engines)
            raise
        self._audit.admit(rows)
        if connection.choice.reloads and self._config.audit_every_steps:
            self._audit.note_reloads(connection, self._destinations, engines)
        self._destinations.commit(version, engines=engines)
        seconds = max(rank.pull_s + rank.verify_s for rank in received)
        logger.info("engines %s hold version %d again, after %.3f s", ", ".join(map(str, engines)), version, seconds)

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None, "connect before calibrate and publish"
        return self._connection

    def _reconnect(self, choice: Choice | None = None) -> None:
        """Plans for the present processes, and connects them."""
        self._is_open = False
        sources, self._infos = both(
            lambda: self._source.call(SourceRank.describe),
            lambda: self._destinations.call(DestinationRank.describe),
            self._meeting,
        )
        engines = self._destinations.engines()
        self._connection = make_connection(sources, self._infos, engines, self._config, choice, seed=self._seed)
        if self._hold:
            self._hold.prepare(sources, self._infos, engines, self._connection.dtypes)
        logger.info("%s", self._connection.choice)
        logger.info("%s", self._connection.plan.describe())
        open_connection(self._connection, self._source, self._destinations, self._config, self._meeting)
        self._is_open = True

    def _bring(self, version: int) -> tuple[list[Received], float, float]:
        """Sends `version` to every engine and opens them, from the start again whenever engines died and were
        restarted. Returns the results of `_deliver`, and when it closed the first gate."""
        revived: set[int] = set()
        closed: float | None = None
        while True:
            try:
                if revived:
                    self._admit(sorted(revived))
                elif not self._is_open:
                    self._reconnect(self._connected.choice)
                closed = closed or time.perf_counter()
                received, compare_s = self._deliver(version)
                self._destinations.commit(version)
                return received, compare_s, closed
            except WorkerDied as error:
                engines = self._destinations.revive()
                if not engines:
                    raise
                logger.warning("restarted engines %s: %s", ", ".join(map(str, engines)), error)
                revived.update(engines)

    def _again(self, engines: Sequence[int] | None) -> None:
        """Sends the present version again, which the trainer must still hold."""
        assert self._version is not None
        self._deliver(self._version, engines=engines, again=True)
        self._destinations.commit(self._version, engines=engines)

    def _moved_on(self, totals: Digests) -> bool:
        """Returns whether these digests of the trainer's weights differ from those of the present version."""
        # 0 on both sides for tensors that no engine holds.
        return bool((totals != self._totals).any())

    def _deliver(
        self, version: int, *, engines: Sequence[int] | None = None, again: bool = False
    ) -> tuple[list[Received], float]:
        """Returns (the ranks' reports, seconds of comparison). One round of calls, then the proof."""
        if not self._is_open:
            self._reconnect(self._connected.choice)
        with self._gates(version, engines):
            # The engines' way is the longer one, and begins first.
            received, sent = both(
                lambda: self._destinations.receive(version, engines=engines),
                lambda: self._source.call(SourceRank.send),
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
                f"version {version}: source ranks {rank} and {replica} hold different contents of the "
                f"same part of {connection.names[column]}: the trainer's replicas have drifted apart"
            )
        totals = connection.source_totals(sent)
        if again and self._moved_on(totals):
            raise WeightSyncFailed(
                f"version {version} cannot be sent to an engine again: the trainer's weights have changed since"
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
        """Keeps the engines shut if the block fails, and adds to the error which version each of them holds."""
        try:
            yield
        except BaseException as error:
            # After any error no engine may sample with unproved weights.
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
