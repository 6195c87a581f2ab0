"""The program of a worker: `python -m rlframe.processes.worker REQUESTS ANSWERS`, two file descriptors.

It answers one line per task, in order, as soon as the task is done, so that the pool always knows which task a silent
or dead worker is stuck in. Tasks are users' code: whatever they print, fork, exit from or allocate must fail one task
only. So they print into a separate pipe, answers carry a key that no printed text has, a fork that returns from a task
ends silently, and the kernel refuses memory beyond a limit.
"""

import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rlframe.processes.work import Limits, TaskFailed, Work

ORPHAN_GRACE_S = 5.0
"""Seconds after which a worker whose pool was killed ends itself. The pool kills stuck workers."""
GIGABYTE = 1 << 30
LONGEST_MESSAGE = 600
"""Greatest number of characters of an error message."""
LONGEST_PLACE = 100
"""Greatest number of characters of the name of the file that raised it."""
OWN = f"{Path(__file__).parents[1]}{os.sep}"
STANDARD, *INSTALLED = (f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "purelib", "platlib"))
STARTED = -1
"""Number of the first answer, which reports that the work is prepared."""

Answer = Callable[[int, str | None, str], None]
"""Sends the number of a task with why it failed, or None and the JSON of its value."""


def main() -> None:
    """Reads the key, the work and the limits, reports that it is ready, and does tasks until the pipe closes."""
    # A run that a script started in the background has SIGINT ignored, and so would its workers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests, answers = os.fdopen(int(sys.argv[1]), "rb"), int(sys.argv[2])
    key, work, limits = pickle.load(requests)
    limit(limits)
    owner = os.getpid()

    def answer(number: int, why: str | None, value: str) -> None:
        if os.getpid() != owner:
            # A task forked and returned twice. Only the original process may answer.
            os._exit(0)
        line = f"[{json.dumps(key)}, {number}, {json.dumps(why)}, {value}]\n".encode("ascii")
        while line:
            line = line[os.write(answers, line) :]

    run = prepared(work, answer)
    if run is None:
        return
    try:
        serve(requests, run, limits, answer, work=work)
    except (EOFError, OSError):
        return


def prepared(work: Work, answer: Answer) -> Callable[[Any], Any] | None:
    """Returns what does tasks, and says so; None where it cannot be prepared, which is said too."""
    try:
        run = work.prepare()
    except BaseException as error:  # A user's file may raise anything; the pool reports it.
        answer(STARTED, described(error), "null")
        return None
    answer(STARTED, None, "null")
    return run


def limit(limits: Limits) -> None:
    """Makes the kernel refuse memory beyond the limit, and kill this process first if the machine runs out of it."""
    most = int(limits.memory_gb * GIGABYTE)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


def serve(requests: BinaryIO, run: Callable[[Any], Any], limits: Limits, answer: Answer, *, work: Work) -> None:
    """Does chunk after chunk of `work`, by `run`. Raises EOFError or OSError if the pool has ended."""
    known: set[str] = set()
    with open(os.devnull, "w") as nowhere:
        while True:
            tasks: list[tuple[int, Any]] = pickle.load(requests)
            patience_s = sum(work.limit_s(task, limits) for _, task in tasks) + ORPHAN_GRACE_S
            kinds = {work.kind(task) for _, task in tasks}
            patience_s += limits.first_s * len(kinds - known)
            known |= kinds
            faulthandler.dump_traceback_later(patience_s, exit=True, file=nowhere)
            for number, task in tasks:
                answer(number, *attempted(run, task, limits))
            faulthandler.cancel_dump_traceback_later()


def attempted(run: Callable[[Any], Any], task: Any, limits: Limits) -> tuple[str | None, str]:
    """Returns why the task failed, or None and the JSON of its value."""
    try:
        value = json.dumps(run(task))
    except TaskFailed as failure:
        return str(failure)[:LONGEST_MESSAGE], "null"
    except BaseException as error:  # one failed task, counted by the caller; sys.exit must not end the worker
        return described(error), "null"
    if len(value) > limits.answer_bytes:
        return f"an answer must have at most {limits.answer_bytes} bytes of JSON, got {len(value)}", "null"
    return None, value


def described(error: BaseException) -> str:
    """Returns the error as one string with the line of users' code that raised it, even if its class fails to format
    it."""
    try:
        text = str(error)
    except Exception as broken:  # The user's class may raise anything.
        text = f"an error whose text raises {type(broken).__name__}"
    place = place_of(error)
    return f"{type(error).__name__}: {text}"[: LONGEST_MESSAGE - len(place)] + place


def place_of(error: BaseException) -> str:
    """Returns ` (at folder/file.py:6)`: the last line outside rlframe and Python's library, of a file that is in no
    installed package if there is one. Empty if there is no such line."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    lines = [(file, number) for file, number in lines if not file.startswith((OWN, "<"))]
    users = [(file, number) for file, number in lines if not file.startswith((STANDARD, *INSTALLED))]
    packages = [(file, number) for file, number in lines if file.startswith(tuple(INSTALLED))]
    if not users and not packages:
        return ""
    file, number = (users or packages)[-1]
    return f" (at {'/'.join(Path(file).parts[-2:])[-LONGEST_PLACE:]}:{number})"


if __name__ == "__main__":
    main()
