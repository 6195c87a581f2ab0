"""Dispatch of `generate` calls to engines: submits them, returns answers as they finish, resubmits when an engine
dies."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlframe.cluster.worker_group import WorkerGroup
from rlframe.rollout.fleet.worker import EngineWorker
from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.utils.errors import EngineDied, RlframeError, WorkerDied

ABORT_S = 10.0
"""Seconds that engines may take to abort calls that are no longer needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Requests sent to one engine in one call."""

    engine: int
    indices: list[int]
    """The caller's indices of the requests."""
    requests: list[GenerationRequest]
    version: int | None
    """The proved version when the call was submitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    call: Call
    life: int
    """Number of the actor, among those that have run the engine, that received the call."""


class Dispatch:
    """The calls of one `stream`. Each call is answered exactly once, however often its engine dies."""

    def __init__(
        self, workers: WorkerGroup[EngineWorker], *, max_calls: int, revive: Callable[[int, WorkerDied], None]
    ):
        """Starts with no calls under way.

        Args:
            max_calls: greatest number of calls that each engine gets at the same time; further calls wait here.
            revive: replaces the actor of a dead engine by a new one that is ready to sample; raises if no restart is
                left.
        """
        self._workers, self._max_calls, self._revive = workers, max_calls, revive
        self._stack = ExitStack()
        self._activity = self._stack.enter_context(workers.waiting("generate"))
        self._running: dict[ray.ObjectRef, _Running] = {}
        self._lives = [0] * len(workers.actors)
        self._waiting: list[deque[Call]] = [deque() for _ in workers.actors]
        self._free = [max_calls] * len(workers.actors)

    def __len__(self) -> int:
        """Returns the number of calls without an answer."""
        return len(self._running) + sum(map(len, self._waiting))

    def submit(self, call: Call) -> None:
        """Submits a call to its engine, now or as soon as the engine has fewer than `max_calls`."""
        self._waiting[call.engine].append(call)
        self._hand_out(call.engine)

    def _hand_out(self, engine: int) -> None:
        while self._free[engine] and self._waiting[engine]:
            call = self._waiting[engine].popleft()
            self._free[engine] -= 1
            reference = self._workers.ask(engine, EngineWorker.generate, call.requests)
            self._running[reference] = _Running(call=call, life=self._lives[engine])

    def next(self) -> tuple[Call, list[Completion]]:
        """Waits for an answer and returns its call and the answer.

        Raises:
            WorkerDied: an engine did not answer in time, failed, or died once too often.
            RlframeError: an engine raised one on purpose.
        """
        while True:
            engines = sorted({running.call.engine for running in self._running.values()})
            self._workers.note_pending(self._activity, engines)
            done, _ = self._workers.some(list(self._running), self._activity)
            running = self._running.pop(done[0])
            engine = running.call.engine
            self._free[engine] += 1
            try:
                completions = self._workers.answer(done[0], self._activity)
            except (RayActorError, RayTaskError) as error:
                self._give_again(running, self._workers.failure(error, engine, "generate"), error)
                continue
            self._hand_out(engine)
            return running.call, completions

    def _give_again(self, running: _Running, failure: RlframeError, error: Exception) -> None:
        """Restarts the engine of a failed call if it is dead, and submits the call again."""
        engine = running.call.engine
        dead = isinstance(error, RayActorError) or isinstance(failure, EngineDied)
        if not dead or not isinstance(failure, WorkerDied):
            raise failure from None
        # The other calls of the dead actor fail too, one by one; by then a new actor has replaced it.
        if running.life == self._lives[engine]:
            self._revive(engine, failure)
            self._lives[engine] += 1
        self._waiting[engine].appendleft(running.call)
        self._hand_out(engine)

    def abandon(self) -> None:
        """Aborts the calls under way and drops their answers. Returns when the engines have aborted them."""
        engines = {running.call.engine for running in self._running.values()}
        aborts = self._workers.ask_all(EngineWorker.abort, ranks=engines)
        # Wait for the aborts: a late abort would cancel the next caller's requests.
        calls = [*aborts, *self._running]
        ray.wait(calls, num_returns=len(calls), timeout=ABORT_S)
        self._running.clear()

    def close(self) -> None:
        """Forgets all calls without waiting for them."""
        self._stack.close()


def balanced(
    prompt_tokens: Sequence[int], groups: Sequence[int], *, max_tokens: int, num_engines: int
) -> list[list[int]]:
    """Returns for each engine the indices of its requests, in order.

    Whole groups are dealt, the largest first, each to the engine with the fewest tokens so far. A group counts its
    prompt once, because it is prefilled once, and its responses at full length.

    Args:
        prompt_tokens: number of prompt tokens of each request.
        groups: group of each request; requests of one group have the same prompt.
        max_tokens: greatest number of tokens of one response.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)

    def tokens(group: list[int]) -> int:
        return max(prompt_tokens[index] for index in group) + len(group) * max_tokens

    loads = [0] * num_engines
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    for group in sorted(members.values(), key=tokens, reverse=True):
        engine = loads.index(min(loads))
        loads[engine] += tokens(group)
        shares[engine] += group
    return [sorted(share) for share in shares]
