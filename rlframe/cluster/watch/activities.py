"""The driver's present activities and the workers it waits for. The waiting code records them; the watchdog reads
them."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.limits import Limits
from rlframe.cluster.watch.marks import mark
from rlframe.types.wait import Wait

FRESH_S = 10.0
"""Seconds for which it counts as known what attempts wait for. Their runner tells it each second."""


@dataclass(eq=False, kw_only=True, slots=True)
class Activity:
    """An activity of the driver."""

    name: str
    """Name of the activity, such as train or generate."""
    limit_s: float
    setting: str
    """The dotted key of the setting behind the limit."""
    waits_for: list[WorkerInfo] = field(default_factory=list)
    """Workers whose answers are missing. It shrinks as they arrive."""
    not_started: list[str] = field(default_factory=list)
    """Names of further workers, whose location is not known yet."""
    attempts: Sequence[Wait] = ()
    """The attempts that wait, by what they wait for, engines left out, as their runner has told last."""
    told_s: float = -math.inf
    """Time at which it did, by time.monotonic."""
    is_call: bool = False
    """Whether the activity waits for workers and ends itself at its limit as long as Ray answers. Otherwise it is a
    phase or similar."""
    is_run: bool = False
    """Whether the activity is the whole run, which stands for everything the driver does between phases. Its limit is
    the time it may wait there, not its duration."""
    is_start: bool = False
    """Whether processes are being started, under a limit of their own. An enclosing phase is not charged for that
    time."""
    thread: int = field(default_factory=threading.get_ident)
    begun_s: float = field(default_factory=time.monotonic)
    lent_s: float = 0.0
    """Seconds of process starts in it."""

    def took_s(self) -> float:
        """Returns its duration so far in seconds, without process starts."""
        return time.monotonic() - self.begun_s - self.lent_s

    def tell(self, attempts: Sequence[Wait]) -> None:
        """Records what attempts wait for at this moment."""
        self.attempts, self.told_s = attempts, time.monotonic()

    def known_waits(self) -> Sequence[Wait]:
        """Returns what attempts wait for, or nothing if that was told too long ago."""
        return self.attempts if time.monotonic() - self.told_s < FRESH_S else ()


class Activities:
    """The activities of this process, outermost first, and the limits learned from completed ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: list[Activity] = []
        self.limits = Limits()
        self.num_changes = 0
        """Number of changes: it grows when an activity begins or ends, which shows that the driver is running, and with
        other progress of what it waits for."""
        self.around: Callable[[Activity], AbstractContextManager[Any]] = nullcontext
        """Block around each activity; a profile sets it."""

    def current(self) -> list[Activity]:
        """Returns the activities under way."""
        with self._lock:
            return list(self._current)

    @property
    def phase(self) -> str:
        """The innermost phase under way. Empty between phases."""
        return next((each.name for each in reversed(self.current()) if not each.is_call), "")

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[Activity]:
        """Records `activity` as under way inside the block."""
        with self._lock:
            self._current.append(activity)
            self.num_changes += 1
        mark(activity.name)
        try:
            with self.around(activity):
                yield activity
        finally:
            with self._lock:
                self._current.remove(activity)
                self.num_changes += 1
                mark(self._current[-1].name if self._current else "between phases")
                if activity.is_start:
                    for around in self._current:
                        around.lent_s += time.monotonic() - activity.begun_s

    def note_progress(self) -> None:
        """Records progress of what the driver waits for, besides that of workers, which mark theirs."""
        with self._lock:
            self.num_changes += 1

    def has_start(self) -> bool:
        """Returns whether processes are being started."""
        return any(activity.is_start for activity in self.current())


ACTIVITIES = Activities()
"""The activities of this process. A process has one driver, as it has one logging."""


@contextmanager
def phase(name: str) -> Iterator[Activity]:
    """Records a phase inside the block, under the limit learned from earlier phases of its name."""
    limits = ACTIVITIES.limits
    activity = Activity(name=name, limit_s=limits.of(name), setting="cluster.phase_timeout_s")
    with ACTIVITIES.doing(activity):
        yield activity
    limits.note(name, activity.took_s())


def learn(seconds: float, *, phase: str, role: str, name: str) -> None:
    """Records how long work has taken that was under way before a phase began to wait for it, so that the limits of
    the phase and of the wait allow for as much."""
    ACTIVITIES.limits.note(phase, seconds)
    ACTIVITIES.limits.note(f"{phase}/{role}/{name}", seconds)


@contextmanager
def waiting(name: str, *, role: str, limit_s: float, start_limit_s: float | None = None) -> Iterator[Activity]:
    """Records a wait for workers of `role` inside the block, under the limit learned from earlier waits.

    Args:
        limit_s: upper bound of the limit.
        start_limit_s: limit of a wait for processes that start; no limit is learned from it.
    """
    limits, key = ACTIVITIES.limits, f"{ACTIVITIES.phase}/{role}/{name}"
    start = start_limit_s is not None
    activity = Activity(
        name=name,
        limit_s=start_limit_s if start_limit_s is not None else limits.of(key, ceiling_s=limit_s),
        setting="cluster.start_timeout_s" if start else "cluster.phase_timeout_s",
        is_call=True,
        is_start=start,
    )
    with ACTIVITIES.doing(activity):
        yield activity
    if not start:
        limits.note(key, activity.took_s())
