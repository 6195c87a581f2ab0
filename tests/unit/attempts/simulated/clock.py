"""An event loop whose clock jumps to the next event instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
FOR_EVER_S = 1e9
"""Longer than every limit of a test."""


class Stuck(AssertionError):
    """Raised if the simulated time exceeds its limit, or nothing is left that could happen."""


class Clock(selectors.SelectSelector):
    """Watches no file. `select` advances the time by what it should wait."""

    def __init__(self, limit_s: float):
        super().__init__()
        self.now_s, self._limit_s = 0.0, limit_s

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everything waits, and nothing will happen")
        self.now_s += max(timeout, 0.0)
        if self.now_s > self._limit_s:
            raise Stuck(f"the run has not ended after {self._limit_s:g} simulated seconds")
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs as fast as the processor allows, in an order that depends on nothing but the simulated times."""

    def __init__(self, *, limit_s: float):
        self._clock = Clock(limit_s)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def end(self) -> None:
        """Cancels all tasks and closes the loop."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.wait(tasks))
        self.close()


def simulated(work: Coroutine[Any, Any, T], *, limit_s: float = FOR_EVER_S) -> T:
    """Returns the result of a coroutine, like `asyncio.run`, in simulated time: a pause ends when nothing else can
    happen before, on any machine."""
    loop = SimulatedLoop(limit_s=limit_s)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.end()
