"""Trackers that talk to a network, each on a thread of its own: a server that is slow or gone holds up no step."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlframe.utils.errors import RlframeError

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Steps that may wait to be uploaded; later ones are left out until there is room."""
START_S = 60.0
"""How long a tracker may take to begin."""
CLOSE_S = 30.0
"""How long the end of a run waits for what has not been uploaded yet."""


class Uploads(threading.Thread):
    """Makes a tracker, calls it and closes it, all on one thread, for some trackers keep their state by thread."""

    def __init__(self, name: str, make: Callable[[], Any], *, start_s: float = START_S, close_s: float = CLOSE_S):
        """Returns once the tracker is made.

        Raises:
            RlframeError: it was not made within `start_s` seconds, or could not be.
        """
        super().__init__(name=f"uploads to {name}", daemon=True)
        self._tracker_name, self._make, self._close_s = name, make, close_s
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._begun = threading.Event()
        self._tracker: Any = None
        self._failure: BaseException | None = None
        self.num_left_out = 0
        """Steps that are not uploaded, because too many were waiting, or since the tracker failed."""
        self.start()
        if not self._begun.wait(start_s):
            raise RlframeError(
                f"{name} did not begin within {start_s:g} s; is its server there? logging.* switches it off"
            )
        if self._failure:
            raise self._failure

    def run(self) -> None:
        """Does what is waiting until the end."""
        try:
            self._tracker = self._make()
            self._begun.set()
            while task := self._waiting.get():
                task()
            self._tracker.close()
        except BaseException as failure:  # it belongs to the thread that made this one
            self._failure = failure
            self._begun.set()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Has one step uploaded, later. What does not get there is in metrics.jsonl all the same."""
        if self._put(partial(self._upload, step, dict(metrics))):
            return
        self.num_left_out += 1
        if self.num_left_out == 1:
            reason = f"it failed: {self._failure!r}" if self._failure else f"{MOST_WAITING} steps are waiting"
            logger.warning(
                "%s gets no metrics from step %d on: %s; metrics.jsonl has all", self._tracker_name, step, reason
            )

    def rewind(self, done_steps: int) -> None:
        """Tells the tracker, later, that the steps after `done_steps` come again."""
        self._put(lambda: self._tracker.rewind(done_steps))

    def _put(self, task: Callable[[], None]) -> bool:
        """Returns whether there is room for `task`, and somebody to do it."""
        try:
            self._waiting.put_nowait(task)
        except queue.Full:
            return False
        return self.is_alive()

    def _upload(self, step: int, metrics: dict[str, float]) -> None:
        self._tracker(step, metrics)

    def close(self) -> None:
        """Returns when all is uploaded, or after `close_s` seconds."""
        try:
            self._waiting.put(None, timeout=self._close_s / 2)
        except queue.Full:
            pass
        self.join(self._close_s / 2)
        left = self.num_left_out + (self._waiting.qsize() if self.is_alive() else 0)
        if left or self._failure or self.is_alive():
            reason = repr(self._failure) if self._failure else f"it did not take them within {self._close_s:g} s"
            logger.warning("%s lacks about %d steps: %s; metrics.jsonl has all", self._tracker_name, left, reason)
