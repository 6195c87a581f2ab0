"""Trackers that use a network, each in a thread of its own, so that a slow or missing server delays no step."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlframe.utils.errors import ConfigError, RlframeError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Greatest number of steps that may wait for their upload. Further ones are left out until there is room."""
START_S = 60.0
"""Seconds that a tracker may take to start."""
CLOSE_S = 30.0
"""Seconds that the end of a run waits for pending uploads."""


class Uploads(threading.Thread):
    """Creates a tracker, calls it and closes it, all in one thread, because some trackers keep their state by
    thread."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Any],
        *,
        setting: str = "logging",
        start_s: float = START_S,
        close_s: float = CLOSE_S,
    ):
        """Creates the tracker in its thread and waits for it.

        Args:
            setting: dotted key that asks for the tracker.

        Raises:
            ConfigError: it was not created within `start_s` seconds, or its creation failed.
        """
        super().__init__(name=f"uploads to {name}", daemon=True)
        self._tracker_name, self._make, self._close_s = name, make, close_s
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._begun = threading.Event()
        self._tracker: Any = None
        self._failed = False
        self._failure: BaseException | None = None
        self.num_left_out = 0
        """Number of steps that were not uploaded, because too many were waiting or because the tracker failed."""
        self.start()
        if not self._begun.wait(start_s):
            hint = f"check that its server is reachable, or set {setting}=null"
            raise ConfigError([Fault(setting, said=f"{name} did not start within {start_s:g} s; {hint}")])
        if isinstance(self._failure, RlframeError):
            raise self._failure
        if self._failure:
            said = f"{name} could not start: {_told(self._failure)}"
            raise ConfigError([Fault(setting, said=f"{said}; set {setting}=null to go without")]) from self._failure

    def run(self) -> None:
        """Runs waiting tasks until the end."""
        try:
            self._tracker = self._make()
            self._begun.set()
            while task := self._waiting.get():
                task()
            self._tracker.close(failed=self._failed)
        except BaseException as failure:  # The tracker belongs to the thread that created it.
            self._failure = failure
            self._begun.set()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one step for upload. Steps that are not uploaded are still in metrics.jsonl."""
        if self._put(partial(self._upload, step, dict(metrics))):
            return
        self.num_left_out += 1
        if self.num_left_out == 1:
            reason = f"it failed: {_told(self._failure)}" if self._failure else f"{MOST_WAITING} steps are waiting"
            logger.warning(
                "%s gets no metrics from step %d on: %s; metrics.jsonl has all", self._tracker_name, step, reason
            )

    def rewind(self, done_steps: int | None) -> None:
        """Queues a message to the tracker that the steps after `done_steps` run again."""
        self._put(lambda: self._tracker.rewind(done_steps))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queues a table of samples for upload. What is not uploaded is still in samples.jsonl."""
        self._put(lambda: self._tracker.samples(step, rows))

    def _put(self, task: Callable[[], None]) -> bool:
        """Queues `task`. Returns False if there is no room, or if the thread has ended."""
        try:
            self._waiting.put_nowait(task)
        except queue.Full:
            return False
        return self.is_alive()

    def _upload(self, step: int, metrics: dict[str, float]) -> None:
        self._tracker(step, metrics)

    def close(self, *, failed: bool = False) -> None:
        """Waits until all is uploaded, at most `close_s` seconds.

        Args:
            failed: whether the run ends with an error.
        """
        self._failed = failed
        try:
            self._waiting.put(None, timeout=self._close_s / 2)
        except queue.Full:
            pass
        self.join(self._close_s / 2)
        left = self.num_left_out + (self._waiting.qsize() if self.is_alive() else 0)
        if left or self._failure or self.is_alive():
            reason = _told(self._failure) if self._failure else f"it did not accept them within {self._close_s:g} s"
            what = f"about {left} steps" if left else "the end of the run"
            logger.warning("%s lacks %s: %s; metrics.jsonl has all", self._tracker_name, what, reason)


def _told(failure: BaseException) -> str:
    """Returns an error as a person reads it: ours are sentences, others need their kind."""
    return str(failure) if isinstance(failure, RlframeError) else f"{type(failure).__name__}: {failure}"
