"""Lines about what a start waits for, where it takes long."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.watch.marks import Page
from rlframe.cluster.watch.sight import mark_file
from rlframe.utils.text import printable

EVERY_S = 5.0
"""Seconds in one stage of a start after which a line says so, and again."""
TICK_S = 0.5
MOST_NAMES = 4
FIRST = "imports and checks"


def say(line: str) -> None:
    """Writes a line to standard error, above a progress bar."""
    tqdm.write(printable(line), file=sys.stderr)


class Starting:
    """Reports what a start waits for."""

    def __init__(self, say: Callable[[str], None] = say, *, now: float | None = None):
        """
        Args:
            now: when the start began, of `time.monotonic`; None means now.
        """
        self._say = say
        self._began = time.monotonic() if now is None else now
        self._stage, self._since = "", self._began

    def look(self, now: float) -> None:
        """Reports the stage if it has lasted EVERY_S, or EVERY_S since that was said last."""
        stage, words = stage_of(ACTIVITIES.current())
        if stage != self._stage:
            self._stage, self._since = stage, now
        elif now - self._since >= EVERY_S:
            self._since = now
            self._say(f"starting for {now - self._began:.0f} s: {words}")


@contextmanager
def telling_what_is_awaited() -> Iterator[Callable[[], None]]:
    """Reports what the start waits for until the yielded function is called, or the block ends."""
    over = threading.Event()
    starting = Starting()

    def look() -> None:
        while not over.wait(TICK_S):
            starting.look(time.monotonic())

    threading.Thread(target=look, name="starting", daemon=True).start()
    try:
        yield over.set
    finally:
        over.set()


def stage_of(activities: Sequence[Activity]) -> tuple[str, str]:
    """Returns the name of the present stage, and what it is in words, with the workers that are waited for."""
    if not activities:
        return FIRST, f"{FIRST}; after an install Python compiles the packages once"
    calls = [activity for activity in activities if activity.is_call]
    phases = [activity for activity in activities if not activity.is_call and not activity.is_run]
    if calls:
        return "; ".join(call.name for call in calls), "; ".join(dict.fromkeys(map(_words, calls)))
    if phases:
        return phases[-1].name, phases[-1].name
    return "driver", "data and plans, in the driver"


def _words(call: Activity) -> str:
    workers = list(call.waits_for)
    names = [*call.not_started, *(f"{each.role} rank {each.rank}{_doing(each)}" for each in workers)]
    if not names:
        return call.name
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{call.name}, waiting for {', '.join(names[:MOST_NAMES])}{more}"


def _doing(worker: WorkerInfo) -> str:
    """Returns the last mark of a worker of this machine, in brackets. Empty if it has none."""
    if worker.host != socket.gethostname():
        return ""
    try:
        page = Page(mark_file(worker.path))
    except OSError:
        return ""
    text = page.read().text
    page.close()
    return f" ({text})" if text else ""
