"""The file of a run's warnings, for those who read its report and not its terminal."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlframe.cluster.watch.warned import FILES, read_warnings
from rlframe.utils.errors import OutputError, RlframeError
from rlframe.utils.files.jsonl import append
from rlframe.utils.process.age import program_began
from rlframe.utils.secrets import hidden
from rlframe.utils.warned import MOST, OwnWarnings

WARNINGS = "warnings.jsonl"
LOGS = "logs"
DRIVER = "driver"
"""Role of this process in the lines."""
FAILURE = "the end of the run"
"""Stands in the place of a module in the line of an error that ended the run."""
MOST_OF_A_FAILURE = 4000
"""Greatest number of characters of such an error."""


class Warned:
    """Writes each warning of this process and of the workers as one line. Warnings stay when a run goes back to an
    earlier step."""

    def __init__(self, folder: Path, *, step: Callable[[], int], anew: bool):
        """
        Args:
            folder: of the run.
            step: returns the step that is under way.
            anew: whether the run is new, so that warnings of another one in this folder are removed.
        """
        self._folder, self._file, self._step, self._left = folder, folder / WARNINGS, step, MOST
        self._read: Counter[Path] = Counter()
        """Bytes of each worker's file that are in this one."""
        self._began = time.time() - (time.monotonic() - program_began())
        """The beginning of this program. What workers have said before is of another one."""
        if anew:
            self._file.unlink(missing_ok=True)
        self._own = OwnWarnings(lambda of, text: self.note(text, of=of))
        self._own.begin()

    def note(self, text: str, *, of: str = "rlframe") -> None:
        """Writes a warning of this process. One that cannot be written is on the terminal anyway.

        Args:
            of: name of the module that warns.
        """
        self._write({"time_s": round(time.time(), 3), "role": DRIVER, "of": of, "text": hidden(text)})

    def note_failure(self, error: BaseException) -> None:
        """Writes the error, or the sentence of the signal, that ends the run. A run whose folder is another's by now,
        or cannot be written, leaves it alone."""
        if isinstance(error, OutputError):
            return
        said = str(error)
        if not said or not isinstance(error, RlframeError | KeyboardInterrupt):
            said = f"{type(error).__name__}: {said}".removesuffix(": ")
        self.note(said[:MOST_OF_A_FAILURE], of=FAILURE)

    def gather(self) -> None:
        """Writes the warnings of the workers since the last call."""
        for file in sorted((self._folder / LOGS).glob(FILES)):
            lines, self._read[file] = read_warnings(file, self._read[file])
            for line in lines:
                if line["time_s"] >= self._began:
                    self._write(line)

    def _write(self, line: dict[str, object]) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        try:
            append(self._file, {"step": self._step(), **line})
        except OutputError:
            self._left = 0

    def close(self) -> None:
        """Ends the notes."""
        self.gather()
        self._own.close()
