"""Profiles of single steps, as the driver makes them: it tells the processes when a step and its phases begin and end.

Outside of a profiled step nothing of this is there: `Schedule.profiled` and `Activities.around` are empty blocks.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.cluster.profiling.config import DRIVER, ProfileConfig, step_folder
from rlframe.cluster.profiling.recorders import driver_recorder
from rlframe.cluster.profiling.request import Recorder, Request
from rlframe.cluster.profiling.trace import Summary, summarise
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.watch.limits import Limits
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.loops.reporting.profiles import write_summary
from rlframe.utils.errors import WorkerDied

logger = logging.getLogger(__name__)
RECORDED = "profile/recorded"
"""Metric of steps that were profiled, and so took longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process to profile."""

    role: str
    rank: int
    workers: WorkerGroup[Any]

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.role}_{self.rank}"


class Profiler:
    """Records chosen processes during chosen steps."""

    def __init__(
        self,
        config: ProfileConfig,
        folder: Path,
        processes: Sequence[Process],
        *,
        with_driver: bool,
        marks: dict[str, float],
        say: Callable[[str], None],
    ):
        """
        Args:
            folder: of the run.
            with_driver: whether this process is recorded too.
            marks: metrics that are added to those of the step under way.
            say: shows a line to people.
        """
        self._config, self._folder, self._marks, self._say = config, folder, marks, say
        self._processes, self._with_driver = list(processes), with_driver
        self._under_way: list[Process] = []
        self._driver: Recorder | None = None
        self._phases: list[str] = []
        """The phases under way, the outermost first."""
        self._seen: set[str] = set()
        """Names of the driver's phases and waits of this step."""
        self._thread = threading.get_ident()

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Records the block if it is a step to profile."""
        if step not in self._config.steps:
            yield
            return
        # A step that takes longer on purpose is no measure of other steps, nor are they one of it.
        limits, ACTIVITIES.limits = ACTIVITIES.limits, Limits(ceiling_s=ACTIVITIES.limits.ceiling_s)
        try:
            self._begin(step)
            yield
            self._end(step)
        finally:
            self._forget()
            ACTIVITIES.limits = limits

    def _begin(self, step: int) -> None:
        self._under_way, self._phases, self._seen = list(self._processes), [], set()
        requests = {each.name: self._request(step, each.name) for each in self._processes}
        self._ask(
            "start of the profile",
            lambda each: each.workers.ask(each.rank, Worker.begin_profile, requests[each.name]),
        )
        if self._with_driver:
            self._driver = driver_recorder(self._request(step, DRIVER))
            self._driver.begin()
        self._marks[RECORDED] = 1.0
        ACTIVITIES.around = self._activity

    def _request(self, step: int, name: str) -> Request:
        folder = str(self._folder / step_folder(step))
        return Request(tool=self._config.tool, folder=folder, name=name, stacks=self._config.stacks)

    def _end(self, step: int) -> None:
        """Ends the records, and writes the summary."""
        ACTIVITIES.around = nullcontext
        found: dict[str, Summary] = {}
        if self._driver:
            found[DRIVER] = summarise(self._driver.end(), phases=self._seen)
            self._driver = None
        ended = self._ask("end of the profile", lambda each: each.workers.ask(each.rank, Worker.end_profile))
        found |= {name: summary for name, summary in ended.items() if summary}
        self._under_way = []
        summary = write_summary(self._folder, step, found)
        self._say(f"profile of step {step}: {summary}")

    def _forget(self) -> None:
        """Leaves the step, whether it has ended well or not. Processes whose record has not ended drop it: those that
        live on would record the steps before this one, which are done again."""
        ACTIVITIES.around = nullcontext
        for each in self._under_way:
            self._drop(each)
        self._under_way = []
        self._marks.pop(RECORDED, None)
        if self._driver:
            self._driver.drop()
            self._driver = None

    @contextmanager
    def _activity(self, activity: Activity) -> Iterator[None]:
        """Gives an activity of the driver its range, and tells the processes which phase is under way."""
        is_phase = not activity.is_call and activity.thread == self._thread
        name = f"wait: {activity.name}" if activity.is_call else activity.name
        with self._driver.range(name) if self._driver else nullcontext():
            self._seen.add(name)
            if is_phase:
                self._phases.append(name)
                self._enter()
            yield
            # Not after a failure: the processes may not answer then.
            if is_phase:
                self._phases.pop()
                self._enter()

    def _enter(self) -> None:
        """Sends the processes the innermost phase under way."""
        name = self._phases[-1] if self._phases else ""
        self._ask("profile", lambda each: each.workers.ask(each.rank, Worker.enter_phase, name))

    def _ask(self, doing: str, call_of: Callable[[Process], Any]) -> Mapping[str, Any]:
        """Calls every process, and returns the answers by its name. One that fails is left out from here on: the run
        matters more than its profile.

        Args:
            call_of: starts the call of a process.
        """
        calls = [(each, call_of(each)) for each in self._under_way]
        answers: dict[str, Any] = {}
        for each, call in calls:
            try:
                (answers[each.name],) = each.workers.wait([call], doing=doing, ranks=[each.rank])
            except WorkerDied as error:
                self._under_way.remove(each)
                self._drop(each)
                logger.warning("%s is not profiled in this step: %s", each.name, error)
        return answers

    def _drop(self, process: Process) -> None:
        """Makes a process end its record, and does not wait for it: it may be dead, or hang."""
        process.workers.ask(process.rank, Worker.drop_profile)
