"""The end of the driver when it cannot end by itself: last words, and nothing left of what it has started."""

import os
import sys
import threading

import psutil

from rlframe.utils.text import printable

END_S = 15.0
"""How long the driver may take to leave its run, Ray included, when nothing else is under way."""


def exit_code(error: BaseException | None) -> int:
    """Returns what the program ends with after `error`."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        # A signal that was listened to has its own.
        return getattr(error, "code", 130)
    return 2 if isinstance(error, ValueError) else 1


def end(words: str, *, code: int = 1) -> None:
    """Ends the process with these last words, and all that it has started."""
    sys.stderr.write(f"\n{printable(words)}\n")
    sys.stderr.flush()
    kill_descendants()
    os._exit(code)


def leave_soon() -> None:
    """Has the interpreter leave within END_S, with the code of the error under way: threads that hang in Ray would be
    waited for without an end."""
    code = exit_code(sys.exception())
    words = f"the program has ended, and Python did not leave within {END_S:g} s: left without it"
    timer = threading.Timer(END_S, end, args=(words,), kwargs={"code": code})
    timer.daemon = True
    timer.start()


def kill_descendants() -> None:
    """Kills whatever this process has started, stopped or not."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
