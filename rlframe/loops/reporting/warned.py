"""The file of a run's warnings, for those who read its report and not its terminal."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rlframe.utils.errors import OutputError
from rlframe.utils.jsonl import append
from rlframe.utils.secrets import hidden

WARNINGS = "warnings.jsonl"
MOST = 1000
"""Greatest number of warnings of one process that are written."""


class Warned(logging.Handler):
    """Writes each warning of this process as one line. Warnings stay when a run goes back to an earlier step."""

    def __init__(self, folder: Path, *, step: Callable[[], int], anew: bool):
        """
        Args:
            folder: of the run.
            step: returns the step that is under way.
            anew: whether the run is new, so that warnings of another one in this folder are removed.
        """
        super().__init__(logging.WARNING)
        self._file, self._step, self._left = folder / WARNINGS, step, MOST
        if anew:
            self._file.unlink(missing_ok=True)
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of the log."""
        self.note(record.getMessage(), of=record.name)

    def note(self, text: str, *, of: str = "rlframe") -> None:
        """Writes a warning. One that cannot be written is on the terminal anyway.

        Args:
            of: name of the module that warns.
        """
        if self._left <= 0:
            return
        self._left -= 1
        line = {"step": self._step(), "time_s": round(time.time(), 3), "of": of, "text": hidden(text)}
        try:
            append(self._file, line)
        except OutputError:
            self._left = 0

    def close(self) -> None:
        """Ends the notes."""
        logging.getLogger().removeHandler(self)
        super().close()
