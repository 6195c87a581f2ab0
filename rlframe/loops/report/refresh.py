"""Writes the page of a run again during it, as a tracker in a thread of its own."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframe.loops.report.page import REPORT, write_page

EVERY_S = 60.0
"""Least seconds between two pages."""
SHARE = 0.003
"""Greatest share of the time that is spent on pages."""


class Refresh:
    """Writes the page after the first step and then at most every minute, more rarely where that would take more than
    0.3 % of the time."""

    def __init__(self, folder: Path):
        """
        Args:
            folder: of the run.
        """
        self._folder = folder
        self._due = time.monotonic()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the page if it is due."""
        if time.monotonic() >= self._due:
            self.write()

    def rewind(self, done_steps: int) -> None:
        """Does nothing: the page is made anew each time."""

    def write(self) -> None:
        """Writes the page."""
        began = time.monotonic()
        write_page([self._folder], self._folder / REPORT)
        ended = time.monotonic()
        self._due = ended + max(EVERY_S, (ended - began) / SHARE)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Does nothing: the page has the run's own samples."""

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - as of every tracker
        """Writes the page a last time."""
        self.write()
