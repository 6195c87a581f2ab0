"""WorkerGroup: the Ray actors of one role. Waits for calls, and turns a death or a hang into a sentence."""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.placement import Allocation
from rlframe.cluster.watch.activities import Activity, waiting
from rlframe.cluster.watch.flight import RING
from rlframe.cluster.watch.looking import look_at
from rlframe.cluster.watch.report import account
from rlframe.cluster.watch.sight import log_tail
from rlframe.utils.errors import RlframeError, WorkerDied
from rlframe.utils.outside import SOURCES

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
W_co = TypeVar("W_co", covariant=True)

MOVE_S = 10.0
"""How long an answer that is there may take at least to come here, however late it is."""
LAST_LOOK_S = 2.0
"""Answers that came while the driver itself was stopped arrive a moment after the limit."""
DEATH_NOTICE_S = 3.0
"""How much later than a rank's broken connection the death of the rank at its other end may be known."""


def shared(value: T) -> T:
    """Returns a reference to `value`, which is stored once however many actors get it, and which Ray puts the value in
    the place of. Only good as an argument of `WorkerGroup.ask`."""
    return cast(T, ray.put(value))


class WorkerGroup(Generic[W_co]):
    """One actor per rank. Typed groups (PolicyGroup, RolloutGroup) hold one, of the Protocol of their ranks."""

    def __init__(
        self,
        actor_class: type[W_co],
        *,
        role: str,
        slots: Sequence[Allocation],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
        threads_of: Mapping[str, int] | None = None,
    ):
        """Start the actors and wait until all are there. Their real work starts with the group's first call.

        Args:
            num_threads: CPU threads of each actor.
            call_timeout_s: limit for any later call.
            threads_of: Ray's concurrency groups: by name, how many calls of the methods of that name run at the same
                time, beside the one call of all other methods. None: one call at a time.
        """
        self.role = role
        self.slots = list(slots)
        self.start_timeout_s, self.call_timeout_s = start_timeout_s, call_timeout_s
        self.log_folder = log_folder
        self._num_threads = num_threads
        options: dict[str, Any] = {"concurrency_groups": dict(threads_of)} if threads_of else {}
        self._remote_class: Any = ray.remote(**options)(actor_class) if options else ray.remote(actor_class)
        self.infos: list[WorkerInfo] = []
        self.actors: list[Any] = [self._actor(rank) for rank in range(len(self.slots))]
        self.infos = self.wait([actor.info.remote() for actor in self.actors], doing="start", timeout_s=start_timeout_s)

    def _actor(self, rank: int) -> Any:
        """A new actor on the devices of `rank`."""
        slot = self.slots[rank]
        environment = {
            "OMP_NUM_THREADS": str(self._num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            # Megatron's and torch's would be the last log lines that a failure shows.
            "PYTHONWARNINGS": "ignore",
            **RING,
            **slot.environment,
        }
        options = {"name": None, "max_restarts": 0, "runtime_env": {"env_vars": environment}, **slot.options()}
        return self._remote_class.options(**options).remote(
            role=self.role,
            rank=rank,
            log_folder=self.log_folder,
            num_threads=self._num_threads,
            outside=dict(SOURCES),
        )

    def ask(self, rank: int, method: Callable[[W_co, *Ts], T], *arguments: *Ts) -> "ray.ObjectRef[T]":
        """Has the actor of `rank` begin with a method. `wait` gets the answer."""
        return getattr(self.actors[rank], method.__name__).remote(*arguments)

    def ask_all(
        self, method: Callable[[W_co, *Ts], T], *arguments: *Ts, ranks: Iterable[int] | None = None
    ) -> "list[ray.ObjectRef[T]]":
        """Has the actors of `ranks`, all when None, begin with a method. `wait` gets the answers."""
        return [self.ask(rank, method, *arguments) for rank in (range(len(self.actors)) if ranks is None else ranks)]

    def replace(self, rank: int) -> None:
        """A new actor in the place of one that died or is of no more use. Its real work starts with its first call.

        Raises:
            WorkerDied: the new one died or was not there within the limit for starts.
        """
        ray.kill(self.actors[rank])
        self.actors[rank] = self._actor(rank)
        (self.infos[rank],) = self.wait(
            [self.actors[rank].info.remote()], doing="restart", timeout_s=self.start_timeout_s, ranks=[rank]
        )

    def restart(self) -> None:
        """Puts a new actor in the place of each, alive or not. Their real work starts with their first call.

        Raises:
            WorkerDied: a new one died or was not there within the limit for starts.
        """
        self.stop()
        # Until the new ones have said where they live, messages must not name the old.
        self.infos = []
        self.actors = [self._actor(rank) for rank in range(len(self.slots))]
        self.infos = self.wait(
            [actor.info.remote() for actor in self.actors], doing="restart", timeout_s=self.start_timeout_s
        )

    def deaths(self) -> list[WorkerDied]:
        """Returns an error for each actor whose process has ended, in rank order. Waits DEATH_NOTICE_S at most for
        those that are busy.
        """
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
        """Results of `calls`, in their order. The first failure ends the wait.

        Args:
            doing: what the calls do, for messages.
            timeout_s: limit while the group starts; the group's own for calls when None.
            ranks: rank of the actor of each call; None: one call per actor in rank order.

        Raises:
            WorkerDied: an actor died, raised, or did not answer in time. Names role, rank and node.
            RlframeError: an actor raised one on purpose; it arrives as it was raised.
        """
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
                    except (RayTaskError, RayActorError) as error:
                        cause, culprit = first_cause(error, call, pending)
                        raise self.failure(cause, rank_of[culprit], doing) from None
        return [results[call] for call in calls]

    def some(self, calls: Sequence[Any], activity: Activity) -> tuple[list[Any], list[Any]]:
        """One of `calls` that has an answer, and the others.

        Raises:
            WorkerDied: none had within the limit of `activity`.
        """
        while True:
            for wait_s in (max(0.0, activity.limit_s - activity.took_s()), LAST_LOOK_S):
                done, others = ray.wait(list(calls), num_returns=1, timeout=wait_s)
                if done:
                    return done, others
            if activity.took_s() >= activity.limit_s:
                raise self.hung(activity)

    def answer(self, call: Any, activity: Activity) -> Any:
        """The answer of a call that has one. To bring it here takes a Ray that answers.

        Raises:
            WorkerDied: it could not be brought within the limit.
            RayActorError, RayTaskError: what the call came to.
        """
        try:
            return ray.get(call, timeout=max(MOVE_S, activity.limit_s - activity.took_s()))
        except GetTimeoutError:
            raise self.hung(activity) from None

    def waiting(self, doing: str, *, start_limit_s: float | None = None) -> AbstractContextManager[Activity]:
        """Has the driver wait for these workers inside the block, under the eyes of the watchdog; see `note_pending`.

        Args:
            doing: what they do, for messages.
            start_limit_s: the limit of a wait for processes that start; None: the group's for calls, or less.
        """
        return waiting(doing, role=self.role, limit_s=self.call_timeout_s, start_limit_s=start_limit_s)

    def note_pending(self, activity: Activity, ranks: Iterable[int]) -> None:
        """Tells the watchdog which ranks have not answered."""
        ranks = list(ranks)
        activity.waits_for = [self.infos[rank] for rank in ranks if rank < len(self.infos)]
        activity.not_started = [f"{self.role} rank {rank}" for rank in ranks if rank >= len(self.infos)]

    def failure(self, error: Exception, rank: int, doing: str) -> RlframeError:
        """What `ray.get` raised for a call of `rank`, as an error for people."""
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RlframeError):
                return error.cause
            return WorkerDied(f"{self._name(rank)} failed in {doing}: {error.cause!r}\n{self._log_tail(rank)}\n{error}")
        reason = " ".join(line.strip() for line in str(error).splitlines()[:12])
        return WorkerDied(f"{self._name(rank)} died in {doing}\n{self._log_tail(rank)}\nRay says: {reason}")

    def hung(self, activity: Activity) -> WorkerDied:
        """The error for a wait that has come to its limit: who is late, in which state, with stacks and logs."""
        limit = f"{activity.limit_s:g} s ({activity.setting})"
        return WorkerDied(f"{activity.name} took longer than {limit}; {account(activity)}")

    def _name(self, rank: int) -> str:
        return str(self.infos[rank]) if rank < len(self.infos) else f"{self.role} rank {rank} (not started)"

    def _log_tail(self, rank: int) -> str:
        """The last lines of a worker's log, read on its node."""
        if rank >= len(self.infos):
            return log_tail(str(pathlib.Path(self.log_folder) / f"{self.role}-{rank}.log"))
        info = self.infos[rank]
        (sight,) = look_at([info], closely=False)
        return sight.log or f"(its node {info.host} does not answer; its log there is {info.log})"

    def stop(self) -> None:
        """Kill the actors."""
        for actor in self.actors:
            ray.kill(actor)


def first_cause(error: Exception, call: Any, pending: list[Any]) -> tuple[Exception, Any]:
    """The failure to report, and its call: a death among the `pending` calls rather than `error`, which may be no more
    than a rank's lost connection to the one that died."""
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
