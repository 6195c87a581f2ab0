"""Limits of the duration of phases and calls, learned as multiples of the slowest of the last ones of their kind.

A fixed limit must be long enough for the slowest phase of the slowest run, so every other run waits too long: half an
hour for a train phase of four seconds. After one step a run has its own measure. Phases of one name differ by a factor
of two or three (response lengths, a compilation, a busy file system), rarely by ten. Short phases, whose jitter is
large relative to their duration, have a floor instead. The first of each kind has no predecessor and gets the ceiling.
"""

import math
from collections import defaultdict, deque

NUM_REMEMBERED = 10


class Limits:
    """Limits learned by key."""

    def __init__(self, *, ceiling_s: float = math.inf, factor: float = 1.0, floor_s: float = math.inf):
        """
        Args:
            ceiling_s: limit of the first of its kind, and of all at most.
            factor: limit of the next, in units of the slowest of the last ones.
            floor_s: no limit is less, unless the ceiling is; without one all limits are ceilings.
        """
        self.ceiling_s, self.factor, self.floor_s = ceiling_s, factor, floor_s
        self._took: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_REMEMBERED))

    def note(self, key: str, seconds: float) -> None:
        """Records a duration."""
        self._took[key].append(seconds)

    def of(self, key: str, *, ceiling_s: float = math.inf) -> float:
        """Returns the limit of the next one, in seconds.

        Args:
            ceiling_s: a further ceiling, set by the caller.
        """
        ceiling_s = min(ceiling_s, self.ceiling_s)
        slowest = max(self._took[key], default=math.inf)
        return min(ceiling_s, max(self.floor_s, self.factor * slowest))
