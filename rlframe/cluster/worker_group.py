"""WorkerGroup: the Ray actors of one role. Waits for calls, and turns a death or a hang into a sentence."""

import contextlib
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlframe.cluster.placement import Slot
from rlframe.cluster.worker import STACK_SIGNAL, Worker, WorkerInfo
from rlframe.utils.errors import RlframeError, WorkerDied

LOG_LINES = 20
DEATH_NOTICE_S = 3.0
"""How much later than a rank's broken connection the death of the rank at its other end may be known."""


class WorkerGroup:
    """One actor per rank. Typed groups (PolicyGroup, RolloutGroup) hold one and spell their calls out over `actors`."""

    def __init__(
        self,
        actor_class: type[Worker],
        *,
        role: str,
        slots: Sequence[Slot],
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
            **slot.environment,
        }
        options = {"name": None, "max_restarts": 0, "runtime_env": {"env_vars": environment}, **slot.options()}
        return self._remote_class.options(**options).remote(
            role=self.role, rank=rank, log_folder=self.log_folder, num_threads=self._num_threads
        )

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
                    ray.get(call)
                except RayActorError as error:
                    death = self.failure(error, rank, "the run")
                    assert isinstance(death, WorkerDied)
                    found.append(death)
                except RayTaskError:
                    continue
        return found

    def wait(
        self,
        calls: Sequence[Any],
        *,
        doing: str,
        timeout_s: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Results of `calls`, in their order. The first failure ends the wait.

        Args:
            doing: what the calls do, for messages.
            timeout_s: limit while the group starts; the group's own for calls when None.
            ranks: rank of the actor of each call; None: one call per actor in rank order.

        Raises:
            WorkerDied: an actor died, raised, or did not answer in time. Names role, rank and node.
            RlframeError: an actor raised one on purpose; it arrives as it was raised.
        """
        limit = timeout_s or self.call_timeout_s
        deadline = time.monotonic() + limit
        rank_of = dict(zip(calls, range(len(calls)) if ranks is None else ranks, strict=True))
        pending = list(calls)
        results: dict[Any, Any] = {}
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                key = "cluster.phase_timeout_s" if timeout_s is None else "cluster.start_timeout_s"
                raise self.hung([rank_of[call] for call in pending], doing=doing, limit=f"{limit:g} s ({key})")
            for call in done:
                try:
                    results[call] = ray.get(call)
                except (RayTaskError, RayActorError) as error:
                    cause, culprit = first_cause(error, call, pending)
                    raise self.failure(cause, rank_of[culprit], doing) from None
        return [results[call] for call in calls]

    def failure(self, error: Exception, rank: int, doing: str) -> RlframeError:
        """What `ray.get` raised for a call of `rank`, as an error for people."""
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RlframeError):
                return error.cause
            return WorkerDied(f"{self._name(rank)} failed in {doing}: {error.cause!r}\n{self._log_tail(rank)}\n{error}")
        reason = " ".join(line.strip() for line in str(error).splitlines()[:12])
        return WorkerDied(f"{self._name(rank)} died in {doing}\n{self._log_tail(rank)}\nRay says: {reason}")

    def hung(self, ranks: Sequence[int], *, doing: str, limit: str) -> WorkerDied:
        """The error for calls that these ranks did not answer within the limit, with their stacks."""
        stacks = []
        for rank in ranks:
            if rank < len(self.infos):
                stacks.append(f"{self._name(rank)}, its stack and log:\n{self._log_tail(rank, stack=True)}")
        waiting = ", ".join(self._name(rank) for rank in ranks)
        return WorkerDied(f"{doing} took longer than {limit}; still waiting for {waiting}\n" + "\n".join(stacks))

    def _name(self, rank: int) -> str:
        return str(self.infos[rank]) if rank < len(self.infos) else f"{self.role} rank {rank} (not started)"

    def _log_tail(self, rank: int, *, stack: bool = False) -> str:
        """The last lines of a worker's log, read on its node; with `stack`, its stack is printed there first."""
        if rank >= len(self.infos):
            path = pathlib.Path(self.log_folder) / f"{self.role}-{rank}.log"
            return read_log(str(path), 0)
        info = self.infos[rank]
        reader = ray.remote(read_log).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(info.node_id, soft=False)
        )
        try:
            return ray.get(reader.remote(info.log, info.pid if stack else 0), timeout=10)
        except RayError:
            return f"(its node {info.host} does not answer; its log there is {info.log})"

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
                ray.get(other)
            except RayActorError as death:
                return death, other
            except RayTaskError:
                continue
    return error, call


def read_log(path: str, signal_pid: int) -> str:
    """The last lines of a log file on this machine; first asks process `signal_pid` for its stack unless 0."""
    if signal_pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(signal_pid, STACK_SIGNAL)
        time.sleep(0.5)
    file = pathlib.Path(path)
    if not file.is_file():
        return f"(no log at {path})"
    lines = file.read_text(errors="replace").splitlines()
    return "\n".join(
        [f"last lines of {path}:", *(f"  | {line}" for line in lines[-LOG_LINES * (3 if signal_pid else 1) :])]
    )
