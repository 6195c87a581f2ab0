"""The thread that watches the driver: it warns if nothing progresses, and ends a run that cannot end itself.

It shares only the list of activities with waiting threads. A wait inside Ray releases Python's lock, so this thread
runs even if Ray does not answer.
"""

import faulthandler
import logging
import math
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlframe.cluster.config import FLOOR_STALLS, ClusterConfig
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.network import is_here
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.watch.demand import listening
from rlframe.cluster.watch.leaving import END_S, end, exit_code
from rlframe.cluster.watch.limits import Limits
from rlframe.cluster.watch.looking import DEAD, halted_processes, look_at
from rlframe.cluster.watch.marks import Page, begin_marks, end_marks
from rlframe.cluster.watch.report import account
from rlframe.cluster.watch.sight import State, cpu_seconds, mark_file, process_state
from rlframe.utils.errors import NodeDied, RlframeError

logger = logging.getLogger(__name__)

DRIVER_MARKS = "driver.mark"
STANDARD_ERROR = 2
PATIENCE_S = 12.0
"""Seconds beyond its limit that an activity may take to end itself, with its own message, before the watchdog ends
it."""
LOST_S = 60.0
"""Seconds in place of END_S after the loss of a node, when Ray itself waits for what does not answer, such as the agent
that it sends its metrics to. The run then goes on with other nodes."""
CUT_OFF_S = 1.0
"""Seconds after which the driver leaves a finished run whose server of Ray stays dead, as of a signal to the run's
process group: Ray waits for it in vain. A server that Ray ends itself is gone at once."""
STOPPED_S = 5.0
"""Delay in seconds of a look that shows that the driver was stopped."""
BUSY = 0.5
"""Fraction of a core below which a driver between phases counts as waiting, not computing."""
STARTS_COMPUTE = 0.1
"""Fraction of a core from which a starting process counts as making progress."""


@dataclass(slots=True)
class _Quiet:
    """Time since the last progress of an activity's workers, or of the driver."""

    numbers: dict[int, int] = field(default_factory=dict)
    """Number of the newest mark by rank. The driver's own changes are under -1."""
    since_s: dict[int, float] = field(default_factory=dict)
    next_warning_s: float = 0.0
    """Seconds without progress after which to warn again."""
    cpu_s: float = 0.0
    """CPU seconds of the driver at its last progress."""

    def see(self, key: int, number: int, now: float) -> float:
        """Returns the seconds since the number of `key` changed."""
        if self.numbers.get(key) != number:
            self.numbers[key], self.since_s[key] = number, now
            self.cpu_s = time.process_time()
        return now - self.since_s[key]


class Watchdog(threading.Thread):
    """Looks at the activities of this process a few times per stall_warning_s."""

    def __init__(self, config: ClusterConfig):
        super().__init__(name="watchdog", daemon=True)
        self._stall_s = config.stall_warning_s
        self._ceiling_s = max(config.phase_timeout_s, config.start_timeout_s)
        self._tick_s = min(1.0, self._stall_s / 4)
        self.beat: Callable[[], None] = lambda: None
        """Called at each look, for the reaper, which watches this process from outside."""
        self.leaving: Callable[[], None] = lambda: None
        """Called when the run is over and its processes have ended."""
        self.server_died: Callable[[str], None] = lambda _: None
        """Called with `gcs_server (pid 7)` when a server of Ray is found dead during the run."""
        self.heard: Callable[[], bool] = lambda: False
        """Returns whether a report was requested since the last call; see `demand`."""
        self.asked = threading.Event()
        """Set if a report was requested. Memory is then audited too."""
        self._over = threading.Event()
        self._quiet: dict[Activity, _Quiet] = {}
        self._pages: dict[str, Page] = {}
        self._ending: BaseException | None = None
        self._ends_since_s: float | None = None
        self._dead_since_s: float | None = None
        """Time at which a server of Ray was first found dead after the end. None if none was at the last look."""
        self._looked_s = time.monotonic()
        self._halted: frozenset[str] = frozenset()
        self._told: frozenset[str] = frozenset()

    def run(self) -> None:
        """Looks until `stop` is called."""
        slept = time.monotonic()
        while not self._over.wait(self._tick_s):
            self.beat()
            # If this thread gets no turn, because a call in C holds Python's lock, this ends the process with the
            # stacks of all threads. The same happens to a driver that was stopped for that long.
            faulthandler.dump_traceback_later(self._ceiling_s, exit=True, file=STANDARD_ERROR)
            if (gap_s := time.monotonic() - slept - self._tick_s) > STOPPED_S:
                self._forgive(gap_s)
            current = ACTIVITIES.current()
            self._quiet = {activity: self._quiet.get(activity, _Quiet()) for activity in current}
            for activity in current:
                self._look_after(activity, innermost=current[-1])
            self._look_after_end(current)
            self._look_round()
            if self.heard():
                self._report(current[-1])
            slept = time.monotonic()
        faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """Ends the thread."""
        self._over.set()
        self.join(timeout=PATIENCE_S)
        for page in self._pages.values():
            page.close()

    def ends(self, error: BaseException | None) -> None:
        """Records that the run is over, with `error` or without. The driver has `leave_s` to leave."""
        self.leaving()
        self._ending, self._ends_since_s = error, time.monotonic()

    def _forgive(self, gap_s: float) -> None:
        """Subtracts a time in which none of the driver's threads ran, this one included, so that no other process
        counts as late."""
        level = logging.WARNING if gap_s >= self._stall_s else logging.DEBUG
        logger.log(
            level, "the driver (pid %d) was stopped, or blocked by one call in C, for %.0f s", os.getpid(), gap_s
        )
        for activity in ACTIVITIES.current():
            activity.lent_s += gap_s
        self._quiet.clear()

    def _report(self, activity: Activity) -> None:
        self.asked.set()
        logger.warning(
            "report requested by SIGUSR1: %s has taken %.0f s so far; %s",
            activity.name,
            activity.took_s(),
            account(activity),
        )

    def _look_after(self, activity: Activity, *, innermost: Activity) -> None:
        over_s = -math.inf if activity.is_run else activity.took_s() - activity.limit_s
        if over_s > PATIENCE_S and (activity.is_call or not ACTIVITIES.has_start()):
            limit = f"{activity.limit_s:.3g} s ({activity.setting})"
            # The wait inside a phase knows what is late.
            late = account(activity if activity.is_call else innermost)
            end(f"{activity.name} took longer than {limit}, and the driver cannot end it; {late}")
        # A phase in which code waits for workers is watched by that wait.
        if not (activity.is_call or activity is innermost) or over_s > 0:
            return
        quiet = self._quiet[activity]
        if activity.waits_for:
            quiet_s = self._quiet_workers_s(activity, quiet)
        else:
            quiet_s = quiet.see(-1, ACTIVITIES.num_changes, time.monotonic())
        if activity.is_run and quiet_s > activity.limit_s and time.process_time() - quiet.cpu_s < BUSY * quiet_s:
            end(f"the driver waited between phases for longer than {activity.limit_s:.3g} s ({activity.setting}); "
                f"{account(activity)}")  # fmt: skip
        if quiet_s < self._stall_s:
            quiet.next_warning_s = self._stall_s
        elif quiet_s >= quiet.next_warning_s:
            quiet.next_warning_s = 2 * quiet_s
            logger.warning(
                "%s has made no progress for %.0f s (cluster.stall_warning_s=%g; its limit is %.3g s); %s",
                activity.name, quiet_s, self._stall_s, activity.limit_s, account(activity),
            )  # fmt: skip

    def _quiet_workers_s(self, activity: Activity, quiet: _Quiet) -> float:
        """Returns the seconds since the last progress of any worker, or of the one that is stopped or dead."""
        now = time.monotonic()
        silent, halted = [quiet.see(-1, ACTIVITIES.num_changes, now)], []
        for worker in list(activity.waits_for):
            page = self._page_of(worker)
            if page is None:
                silent.append(self._quiet_elsewhere_s(worker, quiet, now))
                continue
            number = page.read().number
            if activity.is_start:
                # Starting engines and compilers write no marks, so their CPU use counts as progress.
                number += int(cpu_seconds(worker.pid) / (STARTS_COMPUTE * self._stall_s)) << 32
            silent.append(quiet_s := quiet.see(worker.rank, number, now))
            if process_state(worker.pid) in (State.STOPPED, State.DEAD):
                halted.append(quiet_s)
        return max([min(silent), *halted])

    def _quiet_elsewhere_s(self, worker: WorkerInfo, quiet: _Quiet, now: float) -> float:
        """Returns the seconds since the newest mark of a worker on another machine, which is asked once per
        stall_warning_s."""
        quiet_s = quiet.see(worker.rank, quiet.numbers.get(worker.rank, 0), now)
        if quiet_s >= self._stall_s:
            (sight,) = look_at([worker], closely=False)
            if sight.age_s is not None and sight.age_s < self._stall_s:
                quiet_s = quiet.see(worker.rank, quiet.numbers[worker.rank] + 1, now - sight.age_s)
        return quiet_s

    def _page_of(self, worker: WorkerInfo) -> Page | None:
        """Returns the page of a worker of this machine."""
        if not is_here(worker.host, worker.address):
            return None
        key = f"{worker.log}:{worker.pid}"
        if key not in self._pages:
            try:
                self._pages[key] = Page(mark_file(worker.path))
            except OSError:
                return None
        return self._pages[key]

    def _look_round(self) -> None:
        """Warns of a process that was stopped in two looks in a row, before anything waits for it."""
        if time.monotonic() - self._looked_s < self._stall_s / 2:
            return
        self._looked_s = time.monotonic()
        halted = frozenset(halted_processes())
        new, self._halted = halted - self._halted, halted
        for each in halted - new - self._told:
            logger.warning("a process of this run is stopped or dead; %s", each)
            if each.startswith(DEAD) and self._ends_since_s is None:
                self.server_died(each.removeprefix(DEAD))
        self._told = (self._told | (halted - new)) & halted

    def _look_after_end(self, current: list[Activity]) -> None:
        if self._ends_since_s is None:
            return
        now, halted, limit_s = time.monotonic(), halted_processes(), leave_s(self._ending)
        is_dead = any(each.startswith(DEAD) for each in halted)
        self._dead_since_s = (self._dead_since_s or now) if is_dead else None
        is_cut_off = self._dead_since_s is not None and now - self._dead_since_s >= CUT_OFF_S
        if not all(activity.is_run for activity in current):
            self._ends_since_s = now
        elif is_cut_off or now - self._ends_since_s > limit_s:
            what = "cannot end" if is_cut_off else f"did not end within {limit_s:g} s"
            why = "; ".join(halted) or "no process of it is stopped"
            words = f"the run is over, and Ray {what}: {why}; left without it"
            if self._ending is None:
                end(words, code=0)
            # The latter is raised by a signal, with a sentence.
            is_ours = isinstance(self._ending, RlframeError | KeyboardInterrupt)
            text = str(self._ending) if is_ours else "".join(traceback.format_exception(self._ending))
            end(f"{text}\n{words}", code=exit_code(self._ending))


def leave_s(error: BaseException | None) -> float:
    """Returns the seconds in which the driver must have left a run that ended with `error`, or without."""
    return LOST_S if isinstance(error, NodeDied) else END_S


@contextmanager
def watching(config: ClusterConfig, folder: pathlib.Path, *, learns: bool = True) -> Iterator[Watchdog]:
    """Runs a watchdog inside the block, with limits learned inside it only.

    Args:
        folder: folder of the driver's own marks, `driver.mark`.
        learns: whether phases of a kind take similar times. Otherwise the limit of each is cluster.phase_timeout_s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begin_marks(folder / DRIVER_MARKS)
    ACTIVITIES.limits = Limits(
        ceiling_s=config.phase_timeout_s,
        factor=config.phase_timeout_factor,
        floor_s=FLOOR_STALLS * config.stall_warning_s if learns else math.inf,
    )
    watchdog = Watchdog(config)
    run = Activity(name="the run", limit_s=config.phase_timeout_s, setting="cluster.phase_timeout_s", is_run=True)
    try:
        with ACTIVITIES.doing(run), listening() as watchdog.heard:
            watchdog.start()
            try:
                yield watchdog
            finally:
                watchdog.stop()
    finally:
        end_marks()
        ACTIVITIES.limits = Limits()


@contextmanager
def work(watchdog: Watchdog) -> Iterator[None]:
    """Runs the block as the work of a run. Code after the block, such as the end of Ray, is limited by `leave_s`."""
    try:
        yield
    except BaseException as error:
        watchdog.ends(error)
        raise
    watchdog.ends(None)
