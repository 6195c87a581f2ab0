"""What the driver does at present, and for whom it waits: kept here by those who wait, read by the watchdog."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.limits import Limits
from rlframe.cluster.watch.marks import mark


@dataclass(eq=False, kw_only=True, slots=True)
class Activity:
    """Holds one thing that the driver does."""

    name: str
    """Such as train, or generate."""
    limit_s: float
    setting: str
    """The dotted key behind the limit."""
    waits_for: list[WorkerInfo] = field(default_factory=list)
    """Workers whose answers are missing; shrinks as they come."""
    not_started: list[str] = field(default_factory=list)
    """Names of further ones, which have not said yet where they are."""
    is_call: bool = False
    """True: a wait for workers, which ends itself at its limit as long as Ray answers. False: a phase or the like."""
    is_run: bool = False
    """The whole run, which stands for whatever the driver does between phases: limited is how long it may wait there,
    not how long it may take."""
    is_start: bool = False
    """Processes are started, under a limit of their own: no phase around it pays for that time."""
    thread: int = field(default_factory=threading.get_ident)
    begun_s: float = field(default_factory=time.monotonic)
    lent_s: float = 0.0
    """Seconds of starts in it."""

    def took_s(self) -> float:
        """Returns the seconds it has taken so far, starts left out."""
        return time.monotonic() - self.begun_s - self.lent_s


class Activities:
    """Holds the activities of this process, outermost first, and the limits learnt from those that are over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: list[Activity] = []
        self.limits = Limits()
        self.num_changes = 0
        """Grows whenever an activity begins or ends, or an answer comes: the driver itself goes on."""

    def current(self) -> list[Activity]:
        """Returns what is under way."""
        with self._lock:
            return list(self._current)

    @property
    def phase(self) -> str:
        """The innermost phase under way; empty between phases."""
        return next((each.name for each in reversed(self.current()) if not each.is_call), "")

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[Activity]:
        """Has `activity` under way inside the block."""
        with self._lock:
            self._current.append(activity)
            self.num_changes += 1
        mark(activity.name)
        try:
            yield activity
        finally:
            with self._lock:
                self._current.remove(activity)
                self.num_changes += 1
                mark(self._current[-1].name if self._current else "between phases")
                if activity.is_start:
                    for around in self._current:
                        around.lent_s += time.monotonic() - activity.begun_s

    def has_start(self) -> bool:
        """Returns whether processes are being started."""
        return any(activity.is_start for activity in self.current())


ACTIVITIES = Activities()
"""Those of this process. A process has one driver, as it has one logging."""


@contextmanager
def phase(name: str) -> Iterator[Activity]:
    """Has a phase under way inside the block, under the limit that earlier ones of its name have earned."""
    limits = ACTIVITIES.limits
    activity = Activity(name=name, limit_s=limits.of(name), setting="cluster.phase_timeout_s")
    with ACTIVITIES.doing(activity):
        yield activity
    limits.note(name, activity.took_s())


@contextmanager
def waiting(name: str, *, role: str, limit_s: float, start_limit_s: float | None = None) -> Iterator[Activity]:
    """Has a wait for workers of `role` under way inside the block, under the limit that earlier ones have earned.

    Args:
        limit_s: at most.
        start_limit_s: the limit, for a wait for processes that start; such are not learnt from.
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
