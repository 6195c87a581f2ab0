"""Lines about what a start waits for, every few seconds from the first moment of the program on. It imports only what
Python itself needs.

They are written by a process of their own, which a thread tells what is waited for. A thread alone would be silent
where it is needed most: an import keeps Python's lock while the system reads a library from the disk.
"""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

EVERY_S = 5.0
"""Seconds between two lines."""
TICK_S = 0.2
"""Seconds between two looks at what is waited for."""
END_S = 15.0
"""Seconds that a killed process, and a thread that writes to it, may take to end."""
OWN = ("__main__", "rlframe")
"""Packages that are not named where they import another one."""


class Telling:
    """The process that writes the lines, and the thread that tells it what is waited for."""

    def __init__(self, *, every_s: float = EVERY_S):
        self.words: Callable[[], str] = importing
        """Returns what is waited for, in one line."""
        # Isolated: neither the user's modules nor site-packages are looked at.
        self._process = subprocess.Popen([sys.executable, "-IS", __file__, str(every_s)], stdin=subprocess.PIPE)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="telling", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the lines. None comes after this call."""
        self._over.set()
        self._process.kill()
        self._process.wait(END_S)
        self._thread.join(END_S)

    def _look(self) -> None:
        assert self._process.stdin is not None
        told = ""
        with suppress(BrokenPipeError):
            while not self._over.wait(TICK_S):
                if (words := self.words()) and words != told:
                    told = words
                    self._process.stdin.write(f"{words}\n".encode())
                    self._process.stdin.flush()


class _Own:
    """The lines of this program."""

    telling: Telling | None = None


def begin() -> None:
    """Begins the lines, unless they have begun."""
    _Own.telling = _Own.telling or Telling()


def end() -> None:
    """Ends the lines, if they have begun."""
    if _Own.telling:
        _Own.telling.end()
    _Own.telling = None


def tell(words: Callable[[], str]) -> None:
    """Names what is waited for from now on by calling `words`, from another thread."""
    if _Own.telling:
        _Own.telling.words = words


def importing() -> str:
    """Returns which package the main thread imports, in words: of several that import one another, the first. Empty
    where it imports none."""
    frame, first = sys._current_frames().get(threading.main_thread().ident or 0), ""  # noqa: SLF001 - no other way
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package not in OWN:
            first = package
        frame = frame.f_back
    return f"import of {first}; after an install Python compiles the packages once" if first else ""


def main() -> None:
    """Writes a line every EVERY_S about what was read last from standard input, until that is closed."""
    every_s = float(sys.argv[1])
    began = due = time.monotonic()
    due += every_s
    words = "imports"
    # A progress bar leaves the cursor in its line.
    wipe = "\r\x1b[K" if os.isatty(2) else ""
    while True:
        ready, _, _ = select.select([0], [], [], max(0.0, due - time.monotonic()))
        if ready:
            read = os.read(0, select.PIPE_BUF).decode(errors="replace")
            if not read:
                return
            words = read.splitlines()[-1]
        if time.monotonic() >= due:
            due += every_s
            os.write(2, f"{wipe}starting for {time.monotonic() - began:.0f} s: {words}\n".encode())


if __name__ == "__main__":
    # Ctrl-C is the program's to handle; this process ends with it.
    with suppress(KeyboardInterrupt):
        main()
