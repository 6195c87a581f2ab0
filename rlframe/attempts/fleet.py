"""Attempts as the driver sees them: the process of the runner, what it finishes, and the engines that die under it."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar, TypeVarTuple

from ray.exceptions import RayActorError, RayTaskError

from rlframe.attempts.runner import Ended, Load, Lost, News, State
from rlframe.attempts.turns import Task
from rlframe.attempts.worker import NEWS, RunnerCalls, RunnerSetup, RunnerWorker
from rlframe.cluster.placement import DriverNode
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.types.packed import Packed
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, SamplingParams, members
from rlframe.utils.errors import EngineDied, RlframeError, WeightSyncFailed, WorkerDied

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
logger = logging.getLogger("rlframe.attempts")
CANCEL_S = 10.0
"""Seconds that the process may take to forget all attempts, or to end."""
ABORTS_AFTER_S = (0.02, 0.1, 0.5, 2.0, 8.0)
"""Seconds between the aborts of an interruption."""
POLL_S = 1.0
"""Seconds after which the runner answers, whether something has happened or not."""
LATE_S = 5.0
"""Seconds beyond that after which the driver counts as waiting for the runner."""


class Attempts:
    """Attempts prompts with the engines of `rollout`, in a process of their own."""

    def __init__(
        self,
        rollout: RolloutGroup,
        setup: RunnerSetup,
        *,
        role: str = "runner",
        log_folder: str,
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        """Starts the process; the first call waits until it is ready."""
        self.rollout, self._setup = rollout, setup
        self.num_restarts = 0
        """Number of restarts of the process so far."""
        self._open: dict[str, Task] = {}
        """The tasks that were begun and have not ended, by the id of their group."""
        self.workers: WorkerGroup[RunnerCalls] = WorkerGroup(
            RunnerWorker,
            role=role,
            slots=[DriverNode()],
            log_folder=log_folder,
            num_threads=1,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
            threads_of={NEWS: 1},
        )
        self._kept: dict[str, Ended] = {}
        """Groups that ended while the driver waited for other ones."""
        self._aside: dict[str, Ended] = {}
        """Groups of tasks aside that have ended, until `finish`."""
        self._known: list[Any] = []
        """The engines' actors that the runner has."""
        self._paused = False
        """Whether the runner sends no requests: between `pause` and `resume`."""
        self._activity: Activity | None = None
        self._events: Counter[str] = Counter()
        """Number of each Trouble and each Event of attempts since the last look at the metrics."""
        self._load: Load | None = None
        self._load_before: Load | None = None
        """The last load that is known, and the one at the last look at the metrics."""
        self._begin()

    def _begin(self) -> None:
        self._known = list(self.rollout.workers.actors)
        self._beginning: Any = self.workers.ask(0, RunnerCalls.begin, self._setup, self._known)

    def generate(
        self,
        prompts: list[Prompt],
        *,
        group_size: int,
        step: int,
        again: int = 0,
        sampling: SamplingParams | None = None,
    ) -> list[Group]:
        """Returns a group of `group_size` finished and judged rollouts for each prompt, in the order of the prompts.

        Args:
            step: part of the seeds, so that a prompt gets different responses in different steps.
            again: number of times this step has sampled before; part of the seeds for the same reason.
            sampling: parameters that replace the config's, such as greedy ones for evaluation.
        """
        tasks, times = [], Counter[str]()
        for index, prompt in enumerate(prompts):
            group = Group.begin(f"{step}.{again}.{index}", prompt, group_size)
            # A prompt that comes twice is of another epoch the second time.
            tasks.append(self.task(group, step=step, epoch=times[prompt.id], again=again, sampling=sampling))
            times[prompt.id] += 1
        ended = self.run(tasks)
        return [ended[task.group.id].group for task in tasks]

    def run(self, tasks: Sequence[Task]) -> dict[str, Ended]:
        """Runs attempts at the groups of tasks, and returns how each ended, by its id."""
        found: dict[str, Ended] = {}
        names = {task.group.id for task in tasks}
        with self._resumed():
            self.start(list(tasks))
            with self.waiting():
                while len(found) < len(tasks):
                    for ended in self.look(wait_s=POLL_S):
                        (found if ended.group.id in names else self._kept)[ended.group.id] = ended
        self.audit()
        return found

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        """Undoes `pause` inside the block: what is carried over may as well go on."""
        paused = self._paused
        self.resume()
        yield
        if paused:
            self._kept |= {ended.group.id: ended for ended in self.pause()[1]}

    def stream(self, tasks: Iterable[Task], *, most_open: int) -> Iterator[list[Group]]:
        """Runs attempts at the groups of tasks, of which at most `most_open` are under way, and yields groups when they
        have ended. The limit of a wait begins anew with each."""
        left, num_open = iter(tasks), 0
        while True:
            if more := list(islice(left, most_open - num_open)):
                self.start(more)
                num_open += len(more)
            if not num_open:
                break
            with self.waiting():
                ended = self.next()
            num_open -= len(ended)
            yield [each.group for each in ended]
        self.audit()

    def finish(self, names: Collection[str]) -> dict[str, Ended]:
        """Waits for groups of tasks aside, which all may begin now, and returns how each ended, by its id."""
        hurried = None
        with self.waiting():
            while not set(names) <= self._aside.keys():
                if hurried != self.num_restarts:
                    hurried = self.num_restarts
                    self._do(RunnerCalls.hurry, doing="start of attempts")
                self._kept |= {ended.group.id: ended for ended in self.look(wait_s=POLL_S)}
        return {name: self._aside.pop(name) for name in names}

    def have_ended(self, names: Collection[str]) -> bool:
        """Looks once, and returns whether groups of tasks aside have ended, so that `finish` returns them at once."""
        with self.waiting():
            self._kept |= {ended.group.id: ended for ended in self.look(wait_s=0)}
        return set(names) <= self._aside.keys()

    def task(
        self,
        group: Group,
        *,
        step: int,
        epoch: int = 0,
        again: int = 0,
        repeat: int = 0,
        sampling: SamplingParams | None = None,
        aside: bool = False,
    ) -> Task:
        """Returns a task to attempt `group`; see `generate`.

        Args:
            repeat: see `Task`.
            aside: whether only `finish` returns it, and it begins only as long as such tasks are a small share.
        """
        sampling = sampling or self.rollout.setup.rollout.sampling()
        return Task(group=group, sampling=sampling, step=step, epoch=epoch, again=again, repeat=repeat, aside=aside)

    def start(self, tasks: list[Task]) -> None:
        """Begins the attempts of some groups, which `next` returns, or `finish` if they are aside."""
        self._attach()
        self._do(RunnerCalls.start, Packed(tasks), self._version, doing="start of attempts")
        self._open |= {task.group.id: task for task in tasks}

    @property
    def _version(self) -> int:
        """The proved version of the engines."""
        assert self.rollout.version is not None, "calibrate before start"
        return self.rollout.version

    @contextmanager
    def waiting(self) -> Iterator[Activity]:
        """Records inside the block that the driver waits for attempts. `next` is called inside. An error inside forgets
        all attempts."""
        with self.rollout.workers.waiting("generate") as self._activity:
            try:
                yield self._activity
            except RlframeError:
                self.cancel()
                raise
            finally:
                self._activity = None

    def next(self) -> list[Ended]:
        """Waits until groups have ended, and returns them. Restarts engines that die meanwhile.

        Raises:
            WorkerDied: an engine did not answer in time, failed, or died once too often; or the runner died.
            RlframeError: an engine or a reward raised one on purpose.
        """
        if kept := self._take_kept():
            return kept
        while True:
            if ended := self.look(wait_s=POLL_S):
                return ended

    def look(self, *, wait_s: float) -> list[Ended]:
        """Returns the groups that have ended since the last call, without those aside. Waits at most `wait_s` seconds
        for one.

        Raises:
            WorkerDied, RlframeError: as `next`.
        """
        assert self._activity, "inside waiting()"
        self._attach()
        try:
            news = self._news(wait_s, self._activity)
        except (RayActorError, RayTaskError) as error:
            failure = self.workers.failure(error, 0, "attempts")
            if not isinstance(error, RayActorError):
                raise failure from None
            self._restart(failure)
            return []
        self.rollout.workers.note_pending(self._activity, news.busy)
        self._activity.tell(news.waits)
        if news.progresses:
            ACTIVITIES.note_progress()
        if not (news.ended or news.lost or news.failure) and self._activity.took_s() >= self._activity.limit_s:
            # The runner answers, and the engines or the environments do not.
            raise self.rollout.workers.hung(self._activity)
        self._events += news.events
        self._load = news.load
        for level, text in news.warnings:
            logger.log(level, "%s", text)
        # First, so that they do not begin again if the process dies while an engine is replaced.
        others = []
        for ended in news.ended:
            self._check_versions(ended.group)
            if self._open.pop(ended.group.id).aside:
                self._aside[ended.group.id] = ended
            else:
                others.append(ended)
        lost_by = list(self._known)
        for lost in news.lost:
            self._revive(lost, lost_by[lost.engine], self._activity)
        if news.failure:
            raise news.failure
        return others

    def _news(self, wait_s: float, activity: Activity) -> News:
        """Returns the runner's news, for which `activity` waits. Raises Ray's error if it failed."""
        call = self.workers.ask(0, RunnerCalls.news, wait_s)
        if not self.workers.settle([call], timeout_s=wait_s + LATE_S):
            self.workers.note_pending(activity, [0])
        self.rollout.workers.some([call], activity)
        return self.workers.answer(call, activity)

    def score(self, groups: list[Group]) -> None:
        """Fills the rewards of groups that were not attempted here."""
        judged = members(self._do(RunnerCalls.score, groups, doing="rewards"))
        for rollout, scored in zip(members(groups), judged, strict=True):
            rollout.take_rewards(scored)

    def audit(self) -> None:
        """Proves the engines' memory again, if it is due."""
        if self.rollout.audit is not None:
            self.rollout.retry_after_restart(self.rollout.audit)

    def mend(self) -> list[int]:
        """Restarts engines that have died, and gives their successors to the runner. Returns their indices.

        Raises:
            WorkerDied: no restart is left.
        """
        engines = self.rollout.mend()
        self._attach()
        return engines

    @contextmanager
    def between_responses(self) -> Iterator[None]:
        """Begins no response inside the block, and enters it when those under way have ended."""
        self._do(RunnerCalls.hold, doing="end of the responses under way")
        try:
            yield
        finally:
            self._attach()
            self._do(RunnerCalls.release, doing="responses go on")

    @contextmanager
    def interrupted(self) -> Iterator[tuple[list[Task], list[Ended]]]:
        """Interrupts all responses inside the block. Yields the result of `pause`. Responses go on afterwards, unless
        they were paused before."""
        paused = self._paused
        try:
            yield self.pause()
        finally:
            if not paused:
                self.resume()

    def pause(self) -> tuple[list[Task], list[Ended]]:
        """Interrupts all responses until `resume`, so that engines have nothing to answer. Returns the groups under way
        with the tokens that they have, and those that `next` has not returned yet, without those aside.

        Environments and rewards go on meanwhile. A runner that dies then loses no tokens.
        """
        if not self._paused:
            # First, so that a runner that takes the place of one that dies here does not send requests either.
            self._paused = True
            self._do(RunnerCalls.interrupt, doing="interruption of attempts")
            self.rollout.abort()
        tasks = self._do(RunnerCalls.snapshot, doing="interruption of attempts", meanwhile=self._abort_again)
        snapshot = {task.group.id: task for task in tasks}
        with self.waiting():
            ended = [*self.look(wait_s=0), *self._take_kept()]
        # Of groups that a runner had finished before it died, with nobody told, what there was at their begin.
        self._open = {name: snapshot.get(name, task) for name, task in self._open.items()}
        return [task for task in self._open.values() if not task.aside], ended

    def _abort_again(self, call: Any) -> None:
        """Aborts until `call` is answered what was on its way to an engine at the first abort: it would run to its end
        otherwise, and the snapshot waits for it."""
        for wait_s in ABORTS_AFTER_S:
            if self.workers.settle([call], timeout_s=wait_s):
                return
            self.rollout.abort()

    def resume(self) -> None:
        """Undoes `pause`, if there was one: responses go on where they were."""
        if self._paused:
            self._attach()
            self._paused = False
            self._do(RunnerCalls.release, doing="responses go on")

    def _take_kept(self) -> list[Ended]:
        kept, self._kept = self._kept, {}
        return list(kept.values())

    def cancel(self) -> None:
        """Forgets all attempts, and makes the engines abort their requests."""
        self._open.clear()
        self._kept.clear()
        self._aside.clear()
        self._paused = False
        # Whoever is dead by now has nothing to forget.
        self.workers.settle([self.workers.ask(0, RunnerCalls.cancel)], timeout_s=CANCEL_S)
        self.rollout.abort()

    def close(self) -> None:
        """Ends the process and the reward workers."""
        self.workers.settle([self.workers.ask(0, RunnerCalls.close)], timeout_s=CANCEL_S)
        self.workers.stop()

    def state(self) -> State:
        """Returns how many attempts are under way, and how busy the engines were so far."""
        self._load = state = self._do(RunnerCalls.state, doing="state of attempts")
        return state

    @property
    def events(self) -> dict[str, int]:
        """Number of each Trouble and each Event of attempts since the last look at the metrics."""
        return dict(self._events)

    def recall(self, events: Mapping[str, int]) -> None:
        """Counts from the events of a checkpoint on."""
        self._events = Counter(events)

    def metrics(self) -> dict[str, float]:
        """Returns the number of restarts, and how often what happened to attempts since the last call: only what there
        was. And the share of the time since then in which engines and rewards had nothing to do."""
        events, self._events = self._events, Counter()
        metrics = {f"environment/{event}": float(count) for event, count in sorted(events.items())}
        metrics |= {"rollout/runner_restarts": float(self.num_restarts)} if self.num_restarts else {}
        before, self._load_before = self._load_before, self._load
        return metrics | (idle_since(before, self._load) if before and self._load else {})

    def _restart(self, failure: RlframeError) -> None:
        """Replaces a dead process by a new one, which begins all open tasks again. Raises `failure` if no restart is
        left."""
        while True:
            if self.num_restarts >= self._setup.rollout.max_restarts:
                raise failure from None
            self.num_restarts += 1
            logger.warning(
                "restarting the runner of attempts (restart %d of rollout.max_restarts=%d): %s",
                self.num_restarts,
                self._setup.rollout.max_restarts,
                str(failure).partition("\n")[0],
            )
            try:
                self.workers.replace(0)
                self.rollout.abort()
                self._begin()
                self._await_beginning()
                if self._paused:
                    self.workers.wait([self.workers.ask(0, RunnerCalls.interrupt)], doing="interruption of attempts")
                if self._open:
                    # Not by `start`, which repeats itself after a further death: the tasks would begin twice.
                    begun = self.workers.ask(0, RunnerCalls.start, Packed(list(self._open.values())), self._version)
                    self.workers.wait([begun], doing="start of attempts")
                return
            except WorkerDied as error:
                if not self.workers.deaths():
                    raise
                failure = error

    def _await_beginning(self) -> None:
        """Waits until the process is ready."""
        if self._beginning is not None:
            beginning, self._beginning = self._beginning, None
            self.workers.wait([beginning], doing="start of the runner", timeout_s=self.workers.start_timeout_s)

    def _do(
        self,
        method: Callable[[RunnerCalls, *Ts], T],
        *arguments: *Ts,
        doing: str,
        meanwhile: Callable[[Any], None] | None = None,
    ) -> T:
        """Calls a method of the runner and returns its answer.

        Args:
            meanwhile: gets the call that is under way.
        """
        while True:
            try:
                self._await_beginning()
                call = self.workers.ask(0, method, *arguments)
                if meanwhile:
                    meanwhile(call)
                (answer,) = self.workers.wait([call], doing=doing)
                return answer
            except WorkerDied as error:
                if not self.workers.deaths():
                    raise
                self._restart(error)

    def _attach(self) -> None:
        """Sends the runner the actors of engines that were replaced. They hold a proved version when this is called."""
        for engine, actor in enumerate(self.rollout.workers.actors):
            if actor is not self._known[engine]:
                self._do(RunnerCalls.replace, engine, actor, doing="replacement of an engine")
                self._known[engine] = actor

    def _revive(self, lost: Lost, actor: Any, activity: Activity) -> None:
        """Restarts a dead engine, unless that has been done meanwhile. Raises the reason if the engine is not dead.

        Args:
            actor: the actor that failed the call.
        """
        rollout, engine = self.rollout, lost.engine
        try:
            rollout.workers.answer(lost.call[0], activity)
        except (RayActorError, RayTaskError) as error:
            failure = rollout.workers.failure(error, engine, "generate")
            dead = isinstance(error, RayActorError) or isinstance(failure, EngineDied)
            if not dead or not isinstance(failure, WorkerDied):
                raise failure from None
            if rollout.workers.actors[engine] is actor:
                rollout.replace_dead(engine, failure)
        self._attach()

    def _check_versions(self, group: Group) -> None:
        newest = self._version
        for rollout in group.rollouts:
            if (rollout.versions > newest).any():
                raise WeightSyncFailed(
                    f"an engine sampled with weights of version {rollout.versions.max()}, expected at most {newest}"
                )


def idle_since(before: Load, now: Load) -> dict[str, float]:
    """Returns the share of the time between two looks in which engines and rewards had nothing to do. Nothing if there
    was no time, or if a new runner counts from its beginning."""
    span_s = now.now_s - before.now_s
    if span_s <= 0 or not now.goes_on_from(before):
        return {}
    engines_s = (sum(now.busy_s) - sum(before.busy_s)) / len(now.busy_s)
    return {
        "time/engine_idle_fraction": 1 - engines_s / span_s,
        "time/reward_idle_fraction": 1 - (now.rewards_busy_s - before.rewards_busy_s) / span_s,
    }
