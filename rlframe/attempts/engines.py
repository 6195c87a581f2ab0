"""The engines as attempts see them: queues of requests, each answered exactly once, however often its engine dies."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from rlframe.types.rollout import Completion, GenerationRequest, Group

Ask = Callable[[list[GenerationRequest]], Awaitable[list[Completion]]]
"""Sends requests to an engine and returns its answers. Raises EngineLost if the call fails."""


class EngineLost(Exception):
    """Raised if a call of an engine fails. `call` is what the driver learns the reason from."""

    def __init__(self, call: Any):
        super().__init__()
        self.call = call


class EngineQueue:
    """The requests of one engine. All of it runs in one event loop."""

    def __init__(self, ask: Ask, *, max_calls: int, lost: Callable[[EngineLost], None]):
        """
        Args:
            max_calls: greatest number of calls that the engine gets at the same time. With 1, a call has all requests
                that wait; otherwise each request has a call of its own.
            lost: called when the engine has failed; the queue waits for `replace`.
        """
        self._ask, self._max_calls, self._lost = ask, max_calls, lost
        self._waiting: deque[tuple[GenerationRequest, asyncio.Future[Completion]]] = deque()
        self._running = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._life = 0
        """Number of times so far that the engine was replaced, or its requests were forgotten."""
        self._usable = True
        self._held = False
        self._is_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Returns whether a request has no answer."""
        return bool(self._running or self._waiting)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which the engine had a call to answer."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Returns the engine's answer to a request."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._pump_soon()
        return await answer

    def replace(self, ask: Ask) -> None:
        """Replaces the engine by another one, which gets the requests that wait."""
        self._ask, self._usable = ask, True
        self._life += 1
        # Calls of the engine before it fail by themselves, and their requests come back.
        self._pump_soon()

    def forget(self) -> None:
        """Forgets all requests that wait, and undoes `hold`. Answers to those that are running are dropped, because
        nobody waits."""
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
        while self._usable and not self._held and self._waiting and self._running < self._max_calls:
            count = len(self._waiting) if self._max_calls == 1 else 1
            batch = [self._waiting.popleft() for _ in range(count)]
            if batch := [(request, answer) for request, answer in batch if not answer.done()]:
                if not self._running:
                    self._busy_since = time.monotonic()
                self._running += 1
                task = asyncio.get_running_loop().create_task(self._call(batch, self._life))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _call(self, batch: list[tuple[GenerationRequest, asyncio.Future[Completion]]], life: int) -> None:
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
            self._running -= 1
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since
            self._pump_soon()


def size(group: Group, *, max_tokens: int) -> int:
    """Returns the tokens that a group may take: its prompt once, because it is prefilled once, and its responses at
    full length.

    Args:
        max_tokens: greatest number of tokens of one response.
    """
    return max(rollout.num_tokens for rollout in group.rollouts) + len(group.rollouts) * max_tokens
