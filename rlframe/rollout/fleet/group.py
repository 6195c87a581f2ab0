"""RolloutGroup: all engines as one object. It receives the weights of syncs, and replaces engines that die."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframe.cluster.placement import Allocation
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.rollout.base.speculative import Drafts
from rlframe.rollout.fleet.worker import GENERATE, SIGNALS, EngineWorker, RolloutSetup, RolloutWorker, end_processes
from rlframe.types.input import ModelInput
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import EngineDied, RlframeError, WorkerDied
from rlframe.utils.process.early import EarlyProgram
from rlframe.utils.process.memory import MemoryUse, of_role
from rlframe.utils.registry import find
from rlframe.weight_sync.border import DestinationGroup, DestinationRank, Received

T = TypeVar("T")
logger = logging.getLogger(__name__)
ABORT_S = 10.0
"""Seconds that engines may take to abort requests that are no longer needed."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that a broken engine may take to close before its actor is killed."""


class RolloutGroup(DestinationGroup):
    """All engines of a run.

    An engine that dies is restarted and brought to the present version by `rejoin`.
    """

    role: ClassVar[str] = "rollout"
    """Name of the engines in logs and errors."""
    rejoin: Callable[[list[int]], object] | None = None
    """Proves restarted engines and brings them to the present version: `WeightSync.rejoin`. Without it the first death
    of an engine ends the run."""
    audit: Callable[[], None] | None = None
    """Proves the engines' memory again after they have sampled: `WeightSync.audit_if_due`."""
    restore: Callable[[], None] | None = None
    """Restores the present version after a sleep that dropped the weights: `WeightSync.restore`."""

    def __init__(
        self,
        setup: RolloutSetup,
        *,
        slots: list[Allocation],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        """Starts the processes; `start` builds the engines."""
        self.setup = setup
        self.start_timeout_s = start_timeout_s
        self.max_positions = max_positions(setup)
        """Greatest number of tokens of a sequence that the engines take."""
        engine_class, _ = find("rlframe.rollout", setup.rollout.name, key="rollout.name")
        self.max_calls: int = engine_class.max_calls
        self.version: int | None = None
        """Version that every engine is proved to hold. None before calibration."""
        self.num_restarts = 0
        """Number of engine restarts so far."""
        self._lost: set[int] = set()
        """Indices of the engines whose weights a sleep has dropped."""
        self._freed_bytes: int | None = None
        self._memory: list[MemoryUse] = []
        """Memory of each engine rank at the last sync."""
        self._processes: list[list[tuple[int, float]]] = [[] for _ in slots]
        self._starting: list[ray.ObjectRef[list[tuple[int, float]]]] = []
        """The calls under way that start the engines for the first time."""
        self.workers: WorkerGroup[EngineWorker] = WorkerGroup(
            RolloutWorker,
            role=self.role,
            slots=slots,
            log_folder=log_folder,
            num_threads=num_threads,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
            threads_of={GENERATE: self.max_calls, SIGNALS: 1},
            arguments={"ahead": ahead_of(setup)},
        )
        # While other models start. What fails here fails again, and is told, in `start`.
        self.workers.ask_all(EngineWorker.prepare, setup)

    def begin(self) -> None:
        """Has the engines build themselves and load their weights, which `start` waits for. Others can start at the
        same time. Does nothing if they have begun."""
        self._starting = self._starting or self.workers.ask_all(EngineWorker.start, self.setup)

    def start(self) -> None:
        """Waits until the engines are built and have their weights."""
        self.begin()
        calls, self._starting = self._starting, []
        self._started(calls, range(len(calls)))

    def _started(self, calls: "Sequence[ray.ObjectRef[list[tuple[int, float]]]]", engines: Sequence[int]) -> None:
        """Waits for the `calls` that start `engines`."""
        started = self.workers.wait(
            calls, doing="start of the engines", timeout_s=self.start_timeout_s, ranks=list(engines)
        )
        for engine, processes in zip(engines, started, strict=True):
            self._processes[engine] = processes

    def revive(self) -> list[int]:
        """See DestinationGroup."""
        calls = self.workers.ask_all(EngineWorker.is_alive)
        ray.wait(calls, num_returns=len(calls), timeout=CLOSE_TIMEOUT_S)
        dead = []
        for engine, call in enumerate(calls):
            death: RlframeError = EngineDied(f"engine {engine}: its processes ended")
            try:
                if ray.get(call, timeout=0):
                    continue
            except GetTimeoutError:
                # The engine is alive, only busy.
                continue
            except (RayActorError, RayTaskError) as error:
                death = self.workers.failure(error, engine, "weight sync")
            if not isinstance(death, WorkerDied):
                raise death
            self._restart(engine, death)
            dead.append(engine)
        return dead

    def replace_dead(self, engine: int, death: WorkerDied) -> None:
        """Replaces the actor of a dead engine by one at the present version. Raises `death` if no restart is left."""
        if self.rejoin is None:
            raise death from None
        self._restart(engine, death)
        self._bring_back([engine])

    def mend(self) -> list[int]:
        """Replaces the actors of all dead engines by ones at the present version. Returns their indices.

        Raises:
            WorkerDied: no restart is left.
        """
        return self._bring_back(dead) if (dead := self.revive()) else []

    def _bring_back(self, engines: list[int]) -> list[int]:
        """Gives restarted engines the present version, and others that turn out to be dead meanwhile. Returns all of
        them."""
        assert self.rejoin is not None, "only engines that can be brought back are restarted"
        while True:
            try:
                self.rejoin(engines)
                return engines
            except WorkerDied:
                # A sync asks every engine, so that the dead one may be another one.
                dead = self.revive()
                if not dead:
                    raise
                engines = sorted({*engines, *dead})

    def _restart(self, engine: int, death: WorkerDied) -> None:
        """Replaces the actor of a dead engine by one with the initial weights. Raises `death` if no restart is left."""
        while True:
            limit = self.setup.rollout.max_restarts
            if self.num_restarts >= limit:
                raise death from None
            self.num_restarts += 1
            logger.warning(
                "restarting engine %d (restart %d of rollout.max_restarts=%d): %s",
                engine,
                self.num_restarts,
                limit,
                str(death).partition("\n")[0],
            )
            try:
                self._end_engine(engine)
                self.workers.replace(engine)
                calls = self.workers.ask_all(EngineWorker.start, self.setup, ranks=[engine])
                self._started(calls, [engine])
                return
            except WorkerDied as next_death:
                death = next_death

    def _end_engine(self, engine: int) -> None:
        """Ends the actor of an engine and the processes it had started."""
        actor, info = self.workers.actors[engine], self.workers.infos[engine]
        ray.wait([self.workers.ask(engine, EngineWorker.close)], timeout=CLOSE_TIMEOUT_S)
        ray.kill(actor)
        if self._processes[engine]:
            cleanup = ray.remote(end_processes).options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(info.node_id, soft=False)
            )
            try:
                ray.get(cleanup.remote(self._processes[engine]), timeout=60)
            except RayError:
                logger.warning("node %s does not answer; processes of engine %d may still run there", info.host, engine)

    def stop(self) -> None:
        """Ends every engine, and the processes it has started. The group must not be used afterwards."""
        for engine in range(len(self.workers.actors)):
            self._end_engine(engine)

    def retry_after_restart(self, work: Callable[[], T]) -> T:
        """Runs `work` and returns its result. If engines die, restarts them and runs `work` again on all engines, so
        `work` must be idempotent.

        Raises:
            WorkerDied: no restart is left, or the death was not an engine's.
        """
        while True:
            try:
                return work()
            except WorkerDied:
                if self.rejoin is None or not self.mend():
                    raise

    def score(self, sequences: list[ModelInput]) -> list[list[list[float]]]:
        """Returns by engine, then by sequence, the nats of each token but the first; see RolloutEngine.score."""
        return self.retry_after_restart(
            lambda: self.workers.wait(self.workers.ask_all(EngineWorker.score, sequences), doing="score")
        )

    def sleep(self) -> None:
        """Frees device memory for the roles that share the devices."""
        slept = self.retry_after_restart(
            lambda: self.workers.wait(self.workers.ask_all(EngineWorker.sleep), doing="sleep")
        )
        self._lost = {engine for engine, report in enumerate(slept) if report.weights_lost}
        freed = [report.freed_bytes for report in slept if report.freed_bytes is not None]
        self._freed_bytes = sum(freed) if freed else None

    def wake(self) -> None:
        """Undoes `sleep`. Weights that it dropped, and that no sync has replaced since, are synced from the policy
        again."""
        self.retry_after_restart(self._wake)

    def _wake(self) -> None:
        if self._lost:
            assert self.restore is not None, "engines that drop their weights need `restore`"
            self.restore()
        self.workers.wait(self.workers.ask_all(EngineWorker.wake), doing="wake")

    def abort(self) -> None:
        """Aborts all requests. Returns when the engines have aborted them, or after ABORT_S seconds."""
        # Wait for the aborts: a late abort would cancel the next caller's requests.
        calls = self.workers.ask_all(EngineWorker.abort)
        ray.wait(calls, num_returns=len(calls), timeout=ABORT_S)

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the engines: restarts so far, memory at the last sync, bytes that the last sleep freed,
        and what became of drafts since the last call."""
        metrics = of_role("engine", self._memory)
        if self.setup.rollout.speculative is not None:
            # Those of the engines that had answered before another was found dead are lost.
            counts = self.retry_after_restart(
                lambda: self.workers.wait(self.workers.ask_all(EngineWorker.drafts), doing="counts of drafts")
            )
            metrics |= sum(counts, Drafts()).metrics()
        if self._freed_bytes is not None:
            metrics["memory/engine_freed_bytes"] = float(self._freed_bytes)
        return metrics | {"rollout/engine_restarts": float(self.num_restarts)}

    def engines(self) -> list[int]:
        """See DestinationGroup."""
        per_engine = self.setup.rollout.devices_per_engine
        return [engine for engine in range(len(self.workers.actors)) for _ in range(per_engine)]

    def on_ranks(
        self, calls: Sequence[RankCall[DestinationRank, T]], *, engines: Sequence[int] | None = None
    ) -> list[T]:
        """See DestinationGroup."""
        chosen, per_engine = self._chosen(engines), self.setup.rollout.devices_per_engine
        assert len(calls) == len(chosen) * per_engine, "one call for each rank"
        if not calls:
            return []
        asked = [
            self.workers.ask(engine, EngineWorker.on_ranks, calls[place * per_engine : (place + 1) * per_engine])
            for place, engine in enumerate(chosen)
        ]
        return flat(self.workers.wait(asked, doing=f"weight sync ({calls[0]})", ranks=chosen))

    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        """See DestinationGroup."""
        chosen = self._chosen(engines)
        calls = self.workers.ask_all(EngineWorker.receive, version, ranks=chosen)
        received = flat(self.workers.wait(calls, doing="weight sync", ranks=chosen))
        self._memory = [each.memory for each in received]
        self._lost -= set(chosen)
        return received

    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        """See DestinationGroup."""
        chosen = self._chosen(engines)
        # Verified at this point: a response of this version may arrive before the last engine has received the commit.
        self.version = version
        calls = self.workers.ask_all(EngineWorker.commit, version, ranks=chosen)
        self.workers.wait(calls, doing="weight sync (commit)", ranks=chosen)

    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        """See DestinationGroup."""
        calls = self.workers.ask_all(EngineWorker.fail, reason, ranks=self._chosen(engines))
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=CLOSE_TIMEOUT_S)
        for call in done:
            # A dead engine samples nothing, so it need not be marked as failed.
            with contextlib.suppress(RayError):
                ray.get(call, timeout=CLOSE_TIMEOUT_S)

    def _chosen(self, engines: Sequence[int] | None) -> list[int]:
        return list(range(len(self.workers.actors)) if engines is None else engines)


class EvaluationEngines(RolloutGroup):
    """Engines of the policy that evaluate and do nothing else."""

    role = "evaluation"


def ahead_of(setup: RolloutSetup) -> EarlyProgram | None:
    """Returns what the actors of engines with these settings start before they import anything; see
    RolloutEngine.ahead."""
    engine_class, _ = find("rlframe.rollout", setup.rollout.name, key="rollout.name")
    program: EarlyProgram | None = engine_class.ahead(
        setup.rollout, folder=resolve(setup.model), device=setup.device.value
    )
    return program


def max_positions(setup: RolloutSetup) -> int:
    """Returns the greatest number of tokens of a sequence that engines with these settings take."""
    folder = resolve(setup.model)
    positions = load_family(folder).architecture(read_config(folder)).max_positions
    return min(positions, setup.rollout.sequence_tokens or positions)


def flat(lists: Sequence[list[Any]]) -> list[Any]:
    """Returns the elements of all lists, in order."""
    return [element for each in lists for element in each]
