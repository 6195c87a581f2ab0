"""Warnings of a process's own code: what rlframe and the user's files log as a warning or warn of, without what
libraries say."""

import logging
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST = 1000
"""Greatest number of warnings of one process that are noted."""
MOST_OF_ONE = 100
"""Greatest number of warnings of one text and process that are noted."""
ABOUT_CODE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning)
"""Categories that concern who writes code, and not who trains."""
PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


class OwnWarnings(logging.Handler):
    """Notes the warnings of this process from `begin` to `close`."""

    def __init__(self, note: Callable[[str, str], None]):
        """
        Args:
            note: called with the name of the module that warns, or its file, and the text.
        """
        super().__init__(logging.WARNING)
        self._note = note
        self._texts: Counter[str] = Counter()
        self._shown = warnings.showwarning

    def begin(self) -> None:
        """Begins to note. What the process prints of them stays as it is."""
        root = logging.getLogger()
        if not root.handlers and logging.lastResort:
            # It prints the warnings of a process without handlers, and would not beside this one.
            root.addHandler(logging.lastResort)
        root.addHandler(self)
        self._shown, warnings.showwarning = warnings.showwarning, self._warned

    def close(self) -> None:
        """Ends the notes."""
        logging.getLogger().removeHandler(self)
        if warnings.showwarning == self._warned:
            warnings.showwarning = self._shown
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a record of the log."""
        if is_own(record.pathname):
            self.note(record.name, record.getMessage())

    def note(self, of: str, text: str) -> None:
        """Notes a warning, unless there were too many."""
        if self._texts[text] < MOST_OF_ONE and self._texts.total() < MOST:
            self._texts[text] += 1
            self._note(of, text)

    def _warned(self, message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        """Notes a warning that Python shows."""
        self._shown(message, category, filename, *rest)
        if not issubclass(category, ABOUT_CODE) and is_own(filename):
            self.note(Path(filename).stem, str(message))


def is_own(file: str) -> bool:
    """Returns whether a file of code is rlframe's or the user's, and not a library's."""
    path = Path(file).resolve()
    return path.is_relative_to(PACKAGE) or not any(map(path.is_relative_to, LIBRARIES))
