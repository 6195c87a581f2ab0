"""The file of a run's phases: when each began and ended, and on which role."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlframe.utils.files.jsonl import append, keep_steps

TIMELINE = "timeline.jsonl"
DRIVER = "driver"
"""Role of a phase that needs no devices."""


class Timeline:
    """Notes the phases of a run, and writes those of each step as one line."""

    def __init__(self, folder: Path):
        """
        Args:
            folder: of the run.
        """
        self._file = folder / TIMELINE
        self._phases: list[dict[str, Any]] = []
        self._engines: dict[str, Any] = {}

    def ended(self, name: str, on: object, seconds: float, changing_s: float = 0.0) -> None:
        """Notes a phase that ends now.

        Args:
            on: the role that it used. None means none.
            changing_s: seconds at its begin in which roles were put to sleep and woken.
        """
        end = time.time()
        start, role = end - seconds, getattr(on, "role", DRIVER)
        noted = {"name": name, "role": role, "start_s": round(start, 3), "end_s": round(end, 3)}
        if changing_s:
            noted["ready_s"] = round(start + changing_s, 3)
        self._phases.append(noted)

    def engines_sampled(self, seconds: float, busy_s: Sequence[float]) -> None:
        """Notes how long each engine had something to answer, where engines sample all the time.

        Args:
            seconds: length of the time, which ends now.
            busy_s: seconds of it, by engine.
        """
        end = time.time()
        busy = [round(each, 3) for each in busy_s]
        self._engines = {"start_s": round(end - seconds, 3), "end_s": round(end, 3), "busy_s": busy}

    def write(self, step: int) -> None:
        """Writes the phases since the last call, as those of a step. Times are in seconds since 1970."""
        phases, self._phases = self._phases, []
        engines, self._engines = self._engines, {}
        if phases:
            append(self._file, {"step": step, "phases": phases, **({"engines": engines} if engines else {})})

    def rewind(self, done_steps: int) -> None:
        """Removes the phases of steps after `done_steps`, and those that were not written."""
        self._phases.clear()
        self._engines.clear()
        keep_steps(self._file, done_steps)
