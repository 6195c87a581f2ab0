"""WorkerGroup: the Ray actors of one role. Waits for calls, and turns a death or a hang into a sentence."""

import contextlib
import os
import pathlib
import time
from collections.abc import Sequence
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
    ):
        """Start the actors and wait until all are there. Their real work starts with the group's first call.

        Args:
            num_threads: CPU threads of each actor.
            call_timeout_s: limit for any later call.
        """
        remote_class = ray.remote(actor_class)
        environment = {
            "OMP_NUM_THREADS": str(num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            # Megatron's and torch's would be the last log lines that a failure shows.
            "PYTHONWARNINGS": "ignore",
        }
        self.role = role
        self.call_timeout_s = call_timeout_s
        self.infos: list[WorkerInfo] = []
        self.log_folder = log_folder
        self.actors: list[Any] = [
            remote_class.options(
                name=None, max_restarts=0, runtime_env={"env_vars": environment}, **slot.options()
            ).remote(role=role, rank=rank, log_folder=log_folder, num_threads=num_threads)
            for rank, slot in enumerate(slots)
        ]
        self.infos = self.wait([actor.info.remote() for actor in self.actors], doing="start", timeout_s=start_timeout_s)

    def wait(self, calls: Sequence[Any], *, doing: str, timeout_s: float | None = None) -> list[Any]:
        """Results of `calls`, one per actor in rank order. The first failure ends the wait.

        Args:
            doing: what the calls do, for messages.
            timeout_s: limit while the group starts; the group's own for calls when None.

        Raises:
            WorkerDied: an actor died, raised, or did not answer in time. Names role, rank and node.
            RlframeError: an actor raised one on purpose; it arrives as it was raised.
        """
        limit = timeout_s or self.call_timeout_s
        deadline = time.monotonic() + limit
        ranks = {call: rank for rank, call in enumerate(calls)}
        pending = list(calls)
        results: dict[int, Any] = {}
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                key = "cluster.phase_timeout_s" if timeout_s is None else "cluster.start_timeout_s"
                raise self._hung([ranks[call] for call in pending], doing=doing, limit=f"{limit:g} s ({key})")
            for call in done:
                try:
                    results[ranks[call]] = ray.get(call)
                except (RayTaskError, RayActorError) as error:
                    raise self._failure(*first_cause(error, call, pending), ranks, doing) from None
        return [results[rank] for rank in range(len(calls))]

    def _failure(self, error: Exception, call: Any, ranks: dict[Any, int], doing: str) -> RlframeError:
        rank = ranks[call]
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RlframeError):
                return error.cause
            return WorkerDied(f"{self._name(rank)} failed in {doing}: {error.cause!r}\n{self._log_tail(rank)}\n{error}")
        reason = " ".join(line.strip() for line in str(error).splitlines()[:12])
        return WorkerDied(f"{self._name(rank)} died in {doing}\n{self._log_tail(rank)}\nRay says: {reason}")

    def _hung(self, ranks: list[int], *, doing: str, limit: str) -> WorkerDied:
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
