"""The duration of a start, part by part."""

import time
from collections.abc import Callable


class StartUp:
    """Times the parts of a run's start, which follow one another."""

    def __init__(self, began: float, over: Callable[[], None] = lambda: None):
        """
        Args:
            began: when the first part began, of `time.monotonic`.
            over: called when the start is over, and work begins.
        """
        self.over = over
        self.parts: dict[str, float] = {}
        """Seconds by name, in their order."""
        self._last = began

    def done(self, part: str, *, at: float | None = None) -> None:
        """Ends a part, which began when the last one ended.

        Args:
            at: when it ended, of `time.monotonic`; None means now.
        """
        now = time.monotonic() if at is None else at
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """Returns `12.1 s (imports and checks 3.0 s, data 1.2 s)`."""
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.parts.items())
        return f"{sum(self.parts.values()):.1f} s ({parts})"
