"""The end of a driver that cannot end by itself: a last message, and the death of all its processes."""

import os
import sys
import threading

import psutil

from rlframe.utils.text import printable

END_S = 15.0
"""Seconds that the driver may take to leave its run, Ray included, when nothing else is under way."""


def exit_code(error: BaseException | None) -> int:
    """Returns the exit code of the program after `error`."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        # A handled signal has an exit code of its own.
        return getattr(error, "code", 130)
    return 2 if isinstance(error, ValueError) else 1


def end(words: str, *, code: int = 1) -> None:
    """Prints a last message and ends the process and all processes it has started."""
    sys.stderr.write(f"\n{printable(words)}\n")
    sys.stderr.flush()
    kill_descendants()
    os._exit(code)


def leave_soon() -> None:
    """Makes the interpreter leave within END_S, with the exit code of the present error. Python would otherwise wait
    without end for threads that hang in Ray."""
    code = exit_code(sys.exception())
    words = f"the program has ended, and Python did not leave within {END_S:g} s: left without it"
    timer = threading.Timer(END_S, end, args=(words,), kwargs={"code": code})
    timer.daemon = True
    timer.start()


def kill_descendants() -> None:
    """Kills all processes that this process has started, stopped or not."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
