"""Waits: the waits for the same thing that are under way."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlframe.types.wait import Wait


class Waits:
    """Counts waits of attempts for the same thing."""

    def __init__(self) -> None:
        self._begun: dict[object, float] = {}
        """The time at which each wait under way began, in this order."""
        self.num_ended = 0
        """Number of waits that have ended so far."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts one wait inside the block."""
        wait = object()
        self._begun[wait] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[wait]
            self.num_ended += 1

    def told(self, what: str, limit: str) -> list[Wait]:
        """Returns the waits under way as one, or nothing if there is none.

        Args:
            what: see Wait.
            limit: see Wait.
        """
        if not self._begun:
            return []
        longest_s = time.monotonic() - next(iter(self._begun.values()))
        return [Wait(number=len(self._begun), what=what, longest_s=longest_s, limit=limit)]
