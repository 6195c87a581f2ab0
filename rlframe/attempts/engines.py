"""The engines as attempts see them: queues of requests, each answered exactly once, however often its engine dies."""

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from rlframe.attempts.busy import Busy
from rlframe.types.rollout import Completion, GenerationRequest, Group
from rlframe.utils.errors import RlframeError

Ask = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
"""Sends requests to an engine and returns its answers. Raises EngineLost if the call fails."""
Abort = Callable[[list[str]], None]
"""Makes an engine abort requests by their names, some time later. Those that do not run are ignored."""
Batch = list[tuple[GenerationRequest, asyncio.Future[Completion]]]
"""Requests of a call, and what becomes their answers."""
ABORT_AGAIN_S = 1.0
"""Seconds after which an abort is repeated, for requests that were still on their way to the engine."""


def ignore(names: list[str]) -> None:
    """Lets requests run to their end."""


class EngineLost(Exception):
    """Raised if a call of an engine fails. `call` is what the driver learns the reason from."""

    def __init__(self, call: Any):
        super().__init__()
        self.call = call


def names() -> Iterator[str]:
    """Yields names of requests that no other process and no other call of this function gives."""
    prefix = os.urandom(4).hex()
    return (f"{prefix}-{number}" for number in itertools.count())


class EngineQueue:
    """The requests of one engine. All of it runs in one event loop."""

    def __init__(
        self,
        ask: Ask,
        *,
        max_calls: int,
        lost: Callable[[EngineLost], None],
        abort: Abort = ignore,
    ):
        """
        Args:
            max_calls: greatest number of calls that the engine gets at the same time. With 1, a call has all requests
                that wait; otherwise each request has a call of its own, which `ask` may send together.
            lost: called when the engine has failed; the queue waits for `replace`.
            abort: called with the names of requests for whose answers nobody waits any more.
        """
        self._ask, self._abort, self._max_calls, self._lost = ask, abort, max_calls, lost
        self._names = names()
        self._sent: set[str] = set()
        """Names of the requests that the engine has and has not answered."""
        self._unwanted: set[str] = set()
        """Names of such requests for whose answers nobody waits."""
        self._abort_is_due = False
        self._waiting: deque[tuple[GenerationRequest, asyncio.Future[Completion]]] = deque()
        self._calls = Busy()
        self._life = 0
        """Number of times so far that the engine was replaced, or its requests were forgotten."""
        self._usable = True
        self._held = False
        self._is_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Returns whether a request has no answer."""
        return bool(self._calls.running or self._waiting)

    def busy_s(self, now_s: float) -> float:
        """Returns the seconds up to now in which the engine had a call to answer.

        Args:
            now_s: the time, by `time.monotonic`.
        """
        return self._calls.seconds(now_s)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Returns the engine's answer to a request, which gets a name if it has none.

        The engine aborts the request if the wait is cancelled.
        """
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if not request.name:
            request = replace(request, name=next(self._names))
        self._waiting.append((request, answer))
        self._pump_soon()
        try:
            return await answer
        finally:
            if request.name in self._sent:
                self._unwanted.add(request.name)
                if not self._abort_is_due:
                    self._abort_is_due = True
                    asyncio.get_running_loop().call_soon(self._abort_unwanted)

    def replace(self, ask: Ask, abort: Abort = ignore) -> None:
        """Replaces the engine by another one, which gets the requests that wait."""
        self._ask, self._abort, self._usable = ask, abort, True
        self._sent, self._unwanted = set(), set()
        self._life += 1
        # Calls of the engine before it fail by themselves, and their requests come back.
        self._pump_soon()

    def forget(self) -> None:
        """Forgets all requests that wait, and undoes `hold`. Answers to those that are running are dropped, because
        nobody waits: the engine aborts them."""
        self._waiting.clear()
        self._usable, self._held = True, False
        # A call that is running may still fail; nobody needs to know.
        self._life += 1

    def hold(self) -> None:
        """Sends no further call until `release`. Those that are running end."""
        self._held = True

    async def idle(self) -> None:
        """Waits until the engine has answered every call, or has failed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def release(self) -> None:
        """Undoes `hold`."""
        self._held = False
        self._pump_soon()

    def _pump_soon(self) -> None:
        # In the next turn of the loop: requests of the same turn then share a call.
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_due = False
        while self._usable and not self._held and self._waiting and self._calls.running < self._max_calls:
            count = len(self._waiting) if self._max_calls == 1 else 1
            batch = [self._waiting.popleft() for _ in range(count)]
            if batch := [(request, answer) for request, answer in batch if not answer.done()]:
                self._calls.begin()
                task = asyncio.get_running_loop().create_task(self._call(batch, self._life))
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        """Passes an error that is not the engine's death on to those who would wait for ever. It ends the run."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        known = isinstance(error, RlframeError)
        for _, answer in batch:
            if not answer.done():
                answer.set_exception(error if known else RlframeError(f"a call of an engine has failed: {error!r}"))

    def _abort_unwanted(self) -> None:
        self._abort_is_due = bool(self._unwanted)
        if self._unwanted:
            self._abort(sorted(self._unwanted))
            asyncio.get_running_loop().call_later(ABORT_AGAIN_S, self._abort_unwanted)

    async def _call(self, batch: Batch, life: int) -> None:
        names = {request.name for request, _ in batch}
        self._sent |= names
        try:
            completions = await self._ask([request for request, _ in batch])
        except EngineLost as error:
            self._waiting.extendleft(reversed(batch))
            if life == self._life and self._usable:
                self._usable = False
                self._lost(error)
        else:
            for (_, answer), completion in zip(batch, completions, strict=True):
                if not answer.done():
                    answer.set_result(completion)
        finally:
            self._sent -= names
            self._unwanted -= names
            self._calls.end()
            self._pump_soon()


def size(group: Group, *, max_tokens: int) -> int:
    """Returns the tokens that a group may take: its prompt once, because it is prefilled once, and its responses at
    full length.

    Args:
        max_tokens: greatest number of tokens of one response.
    """
    return max(rollout.num_tokens for rollout in group.rollouts) + len(group.rollouts) * max_tokens
