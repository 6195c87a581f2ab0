"""Busy: the seconds in which something was under way."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class Busy:
    """Counts calls under way, and the seconds in which there was one at least."""

    def __init__(self) -> None:
        self.running = 0
        """Number of calls under way."""
        self.num_ended = 0
        """Number of calls that have ended so far."""
        self._seconds, self._since = 0.0, 0.0

    def begin(self) -> None:
        """Records that a call begins."""
        if not self.running:
            self._since = time.monotonic()
        self.running += 1

    def end(self) -> None:
        """Records that a call has ended."""
        self.running -= 1
        self.num_ended += 1
        if not self.running:
            self._seconds += time.monotonic() - self._since

    def during(self, work: Callable[[*Ts], Awaitable[None]]) -> Callable[[*Ts], Awaitable[None]]:
        """Returns `work`, whose calls are counted."""

        async def call(*arguments: *Ts) -> None:
            self.begin()
            try:
                await work(*arguments)
            finally:
                self.end()

        return call

    def seconds(self, now_s: float) -> float:
        """Returns the seconds up to now in which something was under way.

        Args:
            now_s: the time, by `time.monotonic`.
        """
        return self._seconds + (now_s - self._since if self.running else 0.0)
