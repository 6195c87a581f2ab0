"""WorkerGroup: the Ray actors of one role. Waits for calls, and turns a death or a hang into a message."""

import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, RuntimeEnvSetupError

from rlframe.cluster.environment import of_worker
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.joined.nodes import died, gone
from rlframe.cluster.placement import Allocation, DriverNode
from rlframe.cluster.watch.activities import Activity, waiting
from rlframe.cluster.watch.looking import look_at
from rlframe.cluster.watch.report import account
from rlframe.cluster.watch.sight import log_tail
from rlframe.utils.errors import ConfigError, RlframeError, WorkerDied
from rlframe.utils.faults import Fault
from rlframe.utils.outside import SOURCES
from rlframe.utils.process.memory import MemoryUse

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
W_co = TypeVar("W_co", covariant=True)

MOVE_S = 10.0
"""Least time in seconds that an available answer may take to be fetched, however late it is."""
LAST_LOOK_S = 2.0
"""Seconds after the limit in which answers still count that arrived while the driver itself was stopped."""
DEATH_NOTICE_S = 3.0
"""Seconds between a broken connection of a rank and the report that the rank at its other end has died."""


def shared(value: T) -> T:
    """Stores `value` once, however many actors get it, and returns a reference. Ray passes the value itself to methods,
    so it is only valid as an argument of `WorkerGroup.ask`."""
    return cast(T, ray.put(value))


class WorkerGroup(Generic[W_co]):
    """The actors of one role, one per rank. Typed groups (PolicyGroup, RolloutGroup) hold one, with the Protocol of
    their ranks."""

    def __init__(
        self,
        actor_class: type[W_co],
        *,
        role: str,
        slots: Sequence[Allocation | DriverNode],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
        threads_of: Mapping[str, int] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        """Starts the actors. Their real work starts with the group's first call, and the first wait for any call waits
        for all of them to be there, so that groups made in a row start at the same time.

        Args:
            num_threads: CPU threads of each actor.
            call_timeout_s: limit for any later call.
            threads_of: Ray's concurrency groups: number of concurrent calls of the methods of each group, besides one
                call of all other methods. None means one call at a time.
            arguments: those of the actors' class beside Worker's.
        """
        self.role = role
        self.slots = list(slots)
        self.start_timeout_s, self.call_timeout_s = start_timeout_s, call_timeout_s
        self.log_folder = log_folder
        self._num_threads = num_threads
        self._arguments = dict(arguments or {})
        options: dict[str, Any] = {"concurrency_groups": dict(threads_of)} if threads_of else {}
        self._remote_class: Any = ray.remote(**options)(actor_class) if options else ray.remote(actor_class)
        self._infos: list[WorkerInfo] = []
        """The places of the actors. Empty while they start."""
        self.actors: list[Any] = [self._actor(rank) for rank in range(len(self.slots))]
        self._arriving: list[Any] = [actor.info.remote() for actor in self.actors]

    @property
    def infos(self) -> list[WorkerInfo]:
        """The place of each actor. Waits for those that start."""
        self._arrive("start")
        return self._infos

    def _arrive(self, doing: str) -> None:
        """Waits until every actor is there.

        Raises:
            WorkerDied: one died, or did not start within the limit.
        """
        arriving, self._arriving = self._arriving, []
        if arriving:
            self._infos = self.wait(arriving, doing=doing, timeout_s=self.start_timeout_s)

    def _actor(self, rank: int) -> Any:
        """Returns a new actor on the devices of `rank`."""
        slot = self.slots[rank]
        environment = of_worker(slot.environment)
        runtime_env = {**slot.runtime_env, **({"env_vars": environment} if environment else {})}
        options = {"name": None, "max_restarts": 0, "runtime_env": runtime_env or None, **slot.options()}
        return self._remote_class.options(**options).remote(
            role=self.role,
            rank=rank,
            log_folder=self.log_folder,
            num_threads=self._num_threads,
            outside=dict(SOURCES),
            # Ray starts workers of another node where `ray start` was called there, unless it has copied a folder.
            folder=None if "working_dir" in ray.get_runtime_context().runtime_env else os.getcwd(),
            **self._arguments,
        )

    def ask(self, rank: int, method: Callable[[W_co, *Ts], T], *arguments: *Ts) -> "ray.ObjectRef[T]":
        """Starts a method of the actor of `rank`. `wait` returns the answer."""
        return getattr(self.actors[rank], method.__name__).remote(*arguments)

    def ask_all(
        self, method: Callable[[W_co, *Ts], T], *arguments: *Ts, ranks: Iterable[int] | None = None
    ) -> "list[ray.ObjectRef[T]]":
        """Starts a method of the actors of `ranks`, or of all if that is None. `wait` returns the answers."""
        return [self.ask(rank, method, *arguments) for rank in (range(len(self.actors)) if ranks is None else ranks)]

    def memory(self) -> list[MemoryUse]:
        """Returns the memory that each actor and its children use."""
        return self.wait([actor.memory.remote() for actor in self.actors], doing="memory in use")

    def replace(self, rank: int) -> None:
        """Replaces an actor that died or is unusable by a new one. Its real work starts with its first call.

        Raises:
            WorkerDied: the new actor died, or did not start within the limit.
            NodeDied: its node is gone.
        """
        self._check_nodes([rank])
        ray.kill(self.actors[rank])
        self.actors[rank] = self._actor(rank)
        (self._infos[rank],) = self.wait(
            [self.actors[rank].info.remote()], doing="restart", timeout_s=self.start_timeout_s, ranks=[rank]
        )

    def restart(self) -> None:
        """Replaces every actor by a new one, alive or not. Their real work starts with their first call.

        Raises:
            WorkerDied: a new actor died, or did not start within the limit.
            NodeDied: the node of one is gone.
        """
        self._check_nodes(range(len(self.slots)))
        self.stop()
        # Until the new actors have reported their locations, messages must not name the old ones.
        self._infos = []
        self.actors = [self._actor(rank) for rank in range(len(self.slots))]
        self._arriving = [actor.info.remote() for actor in self.actors]
        self._arrive("restart")

    def _check_nodes(self, ranks: Iterable[int]) -> None:
        """Raises NodeDied if the node of one of the ranks is gone. Ray would wait for it."""
        ids = {bundle.node for rank in ranks for bundle in getattr(self.slots[rank], "bundles", ())}
        if lost := gone(ids):
            there = {node.id for node in lost}
            names = [str(info) for info in self._infos if info.node_id in there]
            raise died(lost, said=", ".join(names) or f"{self.role} cannot restart there")

    def deaths(self) -> list[WorkerDied]:
        """Returns an error for each actor whose process has ended, in rank order. Waits at most DEATH_NOTICE_S for busy
        ones."""
        calls = [actor.info.remote() for actor in self.actors]
        settled, _ = ray.wait(calls, num_returns=len(calls), timeout=DEATH_NOTICE_S)
        found = []
        for rank, call in enumerate(calls):
            if call in settled:
                try:
                    ray.get(call, timeout=MOVE_S)
                except RayActorError as error:
                    death = self.failure(error, rank, "the run")
                    assert isinstance(death, WorkerDied)
                    found.append(death)
                except (RayTaskError, GetTimeoutError):
                    continue
        return found

    def wait(
        self,
        calls: "Sequence[ray.ObjectRef[T]]",
        *,
        doing: str,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[T]:
        """Returns the results of `calls`, in their order. The first failure ends the wait.

        Args:
            doing: description of the calls, for messages.
            timeout_s: limit while the group starts; None means the group's limit for calls.
            ranks: rank of the actor of each call; None means one call per actor, in rank order.

        Raises:
            WorkerDied: an actor died, raised, or did not answer in time. Names role, rank and node.
            ConfigError: a node could not make the environment of `cluster.runtime_env`.
            RlframeError: an actor raised one on purpose; it is raised unchanged.
        """
        self._arrive("start")
        rank_of = dict(zip(calls, range(len(calls)) if ranks is None else ranks, strict=True))
        pending = list(calls)
        results: dict[Any, Any] = {}
        with self.waiting(doing, start_limit_s=timeout_s) as activity:
            while pending:
                self.note_pending(activity, [rank_of[call] for call in pending])
                done, pending = self.some(pending, activity)
                for call in done:
                    try:
                        results[call] = self.answer(call, activity)
                    except RuntimeEnvSetupError as error:
                        raise self._without_environment(error, rank_of[call]) from None
                    except (RayTaskError, RayActorError) as error:
                        cause, culprit = first_cause(error, call, pending)
                        raise self.failure(cause, rank_of[culprit], doing) from None
        return [results[call] for call in calls]

    def some(self, calls: Sequence[Any], activity: Activity) -> tuple[list[Any], list[Any]]:
        """Waits until one of `calls` has an answer. Returns it, and the others.

        Raises:
            WorkerDied: none had an answer within the limit of `activity`.
        """
        while True:
            for wait_s in (max(0.0, activity.limit_s - activity.took_s()), LAST_LOOK_S):
                done, others = ray.wait(list(calls), num_returns=1, timeout=wait_s)
                if done:
                    return done, others
            if activity.took_s() >= activity.limit_s:
                raise self.hung(activity)

    def settle(self, calls: "Sequence[ray.ObjectRef[T]]", *, timeout_s: float) -> bool:
        """Waits until `calls` have ended, whatever they answer, or the time is over. Returns whether all have ended."""
        return not ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[1]

    def answer(self, call: Any, activity: Activity) -> Any:
        """Returns the answer of a call that has one. Fetching it needs a Ray that answers.

        Raises:
            WorkerDied: it could not be fetched within the limit.
            RayActorError, RayTaskError: the call failed.
        """
        try:
            return ray.get(call, timeout=max(MOVE_S, activity.limit_s - activity.took_s()))
        except GetTimeoutError:
            raise self.hung(activity) from None

    def waiting(self, doing: str, *, start_limit_s: float | None = None) -> AbstractContextManager[Activity]:
        """Records inside the block that the driver waits for these workers, so that the watchdog sees it; see
        `note_pending`.

        Args:
            doing: description of their work, for messages.
            start_limit_s: limit of a wait for processes that start; None means the group's limit for calls, or less.
        """
        return waiting(doing, role=self.role, limit_s=self.call_timeout_s, start_limit_s=start_limit_s)

    def note_pending(self, activity: Activity, ranks: Iterable[int]) -> None:
        """Records for the watchdog which ranks have not answered."""
        ranks = list(ranks)
        activity.waits_for = [self._infos[rank] for rank in ranks if rank < len(self._infos)]
        activity.not_started = [f"{self.role} rank {rank}" for rank in ranks if rank >= len(self._infos)]

    def failure(self, error: Exception, rank: int, doing: str) -> RlframeError:
        """Returns the error for people that stands for `error`, which `ray.get` raised for a call of `rank`."""
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RlframeError):
                return error.cause
            return WorkerDied(f"{self._name(rank)} failed in {doing}: {error.cause!r}\n{self._log_tail(rank)}\n{error}")
        reason = " ".join(line.strip() for line in str(error).splitlines()[:12])
        return WorkerDied(f"{self._name(rank)} died in {doing}\n{self._log_tail(rank)}\nRay says: {reason}")

    def _without_environment(self, error: RuntimeEnvSetupError, rank: int) -> ConfigError:
        """Returns the error for a worker whose node could not make its environment."""
        said = " ".join(line.strip() for line in str(error).splitlines()[-12:] if line.strip())
        name = f"{self.role} rank {rank}"
        return ConfigError([Fault("cluster.runtime_env", f"cannot be made for {name} on its node", why=said)])

    def hung(self, activity: Activity) -> WorkerDied:
        """Returns the error for a wait that has exceeded its limit: the late workers, their states, stacks and logs."""
        limit = f"{activity.limit_s:g} s ({activity.setting})"
        return WorkerDied(f"{activity.name} took longer than {limit}; {account(activity)}")

    def _name(self, rank: int) -> str:
        return str(self._infos[rank]) if rank < len(self._infos) else f"{self.role} rank {rank} (not started)"

    def _log_tail(self, rank: int) -> str:
        """Returns the last lines of a worker's log, read on its node."""
        if rank >= len(self._infos):
            return log_tail(str(pathlib.Path(self.log_folder) / f"{self.role}-{rank}.log"))
        info = self._infos[rank]
        (sight,) = look_at([info], closely=False)
        return sight.log or f"(its node {info.host} does not answer; its log there is {info.log})"

    def stop(self) -> None:
        """Kills the actors."""
        for actor in self.actors:
            ray.kill(actor)


def first_cause(error: Exception, call: Any, pending: list[Any]) -> tuple[Exception, Any]:
    """Returns the failure to report, and its call. Prefers a death among the `pending` calls to `error`, which may only
    be the lost connection of a rank to the dead one."""
    if pending and isinstance(error, RayTaskError) and not isinstance(error.cause, RlframeError):
        settled, _ = ray.wait(pending, num_returns=len(pending), timeout=DEATH_NOTICE_S)
        for other in settled:
            try:
                ray.get(other, timeout=MOVE_S)
            except RayActorError as death:
                return death, other
            except (RayTaskError, GetTimeoutError):
                continue
    return error, call
