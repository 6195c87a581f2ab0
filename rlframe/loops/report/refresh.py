"""Writes the page of a run again during it, as a tracker in a thread of its own."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.loops.report.page import REPORT, write_page
from rlframe.loops.reporting.uploads import Uploads

EVERY_S = 60.0
"""Least seconds between two pages."""
SHARE = 0.001
"""Greatest CPU time of pages, as a share of the time of the run."""


class Refresh:
    """Writes the page after the first step and then at most every minute, more rarely where that would take more than
    0.1 % of the time."""

    def __init__(self, folder: Path):
        """
        Args:
            folder: of the run.
        """
        self._folder = folder
        self._due = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Returns whether it is time for a page."""
        return time.monotonic() >= self._due

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the page if it is due."""
        if self.is_due:
            self.write()

    def rewind(self, done_steps: int) -> None:
        """Does nothing: the page is made anew each time."""

    def write(self) -> None:
        """Writes the page."""
        began = time.thread_time()
        write_page([self._folder], self._folder / REPORT)
        self._due = time.monotonic() + max(EVERY_S, (time.thread_time() - began) / SHARE)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Does nothing: the page has the run's own samples."""

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - as of every tracker
        """Writes the page a last time."""
        self.write()


class Page(Uploads):
    """The page in a thread of its own, which is only woken for a page: a step that has none leaves it alone."""

    def __init__(self, folder: Path):
        """
        Args:
            folder: of the run.
        """
        super().__init__("report.html", partial(Refresh, folder), setting="logging.report")

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues a page if it is due, and none waits already."""
        if self._tracker.is_due and self._waiting.empty():
            super().__call__(step, metrics)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Does nothing: the page has the run's own samples."""
