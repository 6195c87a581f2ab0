"""Mender: brings engines back that die while the driver waits for the policy's training."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from rlframe.attempts.fleet import Attempts
from rlframe.utils.errors import RlframeError

logger = logging.getLogger(__name__)
LOOK_S = 0.5
"""Seconds between two looks whether an engine has died."""


class Mender:
    """Looks after the engines in a thread of its own between `begin` and `end`. Nothing else may use them then."""

    def __init__(self, attempts: Attempts):
        """
        Args:
            attempts: its engines must be able to come back without the trainer (weight_sync.hold).
        """
        self._attempts = attempts
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mender")
        self._work: Future[None] | None = None

    def begin(self) -> None:
        """Begins to look after the engines."""
        assert self._work is None, "end before begin"
        self._over.clear()
        self._work = self._pool.submit(self._look_after)

    def end(self) -> None:
        """Ends it, after an engine that is coming back has arrived. Does nothing if it has not begun.

        Raises:
            RlframeError: an engine could not come back.
        """
        work, self._work = self._work, None
        if work is not None:
            self._over.set()
            work.result()

    def forget(self) -> None:
        """Ends it because something else has failed, of which an engine's failure may be a consequence."""
        try:
            self.end()
        except RlframeError as error:
            logger.warning("%s", error)

    def _look_after(self) -> None:
        while not self._over.wait(LOOK_S):
            if engines := self._attempts.mend():
                logger.warning("engines %s are back while the policy trains", ", ".join(map(str, engines)))
