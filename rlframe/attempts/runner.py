"""The runner: all attempts under way, one task each, in one event loop."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.admission import Admission
from rlframe.attempts.busy import Busy
from rlframe.attempts.engines import Abort, Ask, EngineLost, EngineQueue, ignore, size
from rlframe.attempts.turns import DONE, Progress, Sides, Task, Turns, WaitsFor
from rlframe.environments.config import EnvironmentConfig
from rlframe.rollout.fleet.loads import Loads
from rlframe.types.packed import Packed
from rlframe.types.rollout import Completion, GenerationRequest, Group, Rollout, members
from rlframe.types.wait import Wait
from rlframe.utils.errors import RlframeError, WeightSyncFailed

logger = logging.getLogger(__name__)
GATHER_S = 0.004
"""Seconds for which `news` waits for more after the first, while attempts are under way. An answer costs two processes
a millisecond, whatever is in it, and groups that began together end within milliseconds."""
FAILED_AT_LEAST = 64
"""Number of attempts after which a run ends in which every attempt has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A group all of whose attempts have ended."""

    group: Group
    """The attempts that became rollouts, judged by the reward functions, in the order of their sample indices."""
    lost: dict[DropReason, list[Rollout]] = field(default_factory=dict)
    """The attempts that are left out, as far as they came, by reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """An engine that failed a call."""

    engine: int
    call: Any
    """Reference of the call, whose answer is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The work of engines and rewards up to one moment."""

    now_s: float
    """Time of the runner's own clock."""
    busy_s: list[float]
    """Seconds so far in which each engine had something to answer."""
    rewards_busy_s: float
    """Seconds so far in which reward functions had something to judge."""

    def goes_on_from(self, before: "Load") -> bool:
        """Returns whether nothing has become less since an earlier load, as where a new runner counts from its
        beginning."""
        engines = zip(before.busy_s, self.busy_s, strict=True)
        return all(then <= now for then, now in [*engines, (before.rewards_busy_s, self.rewards_busy_s)])


@dataclass(kw_only=True, slots=True)
class News:
    """The events of the runner since the last look."""

    ended: list[Ended] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    failure: RlframeError | None = None
    """The error that ends the run, if there is one."""
    busy: list[int] = field(default_factory=list)
    """Indices of the engines with requests under way."""
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """Log level and text of messages to the user."""
    events: Counter[str] = field(default_factory=Counter)
    """Number of each Trouble and each Event of attempts and their environments."""
    load: Load | None = None
    """The work of engines and rewards so far."""
    waits: list[Wait] = field(default_factory=list)
    """The attempts that wait at this moment, by what they wait for, engines left out."""
    progresses: bool = False
    """Whether an environment or a reward has answered since the last look."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A look may find the groups of a whole step, which pickle would take attempt by attempt.
        others = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "ended"}
        return _news, (Packed(self.ended), others)


def _news(ended: Packed[Ended], others: dict[str, Any]) -> News:
    return News(ended=ended.objects(), **others)


@dataclass(frozen=True, kw_only=True, slots=True)
class State(Load):
    """The state of a runner at one moment."""

    attempts: dict[str, int]
    """Number of attempts under way by what they wait for, a WaitsFor."""
    oldest_s: float
    """Age in seconds of the attempt that has been under way for the longest time. 0 without any."""


class Runner:
    """Runs attempts. All of its methods run in one event loop."""

    def __init__(
        self,
        asks: Sequence[Ask],
        sides: Sides,
        *,
        run_seed: int,
        max_calls: int,
        max_positions: int,
        attempt_timeout_s: float,
        environment: EnvironmentConfig | None = None,
        aborts: Sequence[Abort] | None = None,
        aside_share: float = 1.0,
    ):
        """
        Args:
            asks: one for each engine.
            max_calls: greatest number of calls that an engine gets at the same time.
            max_positions: greatest number of tokens of a sequence that engine and trainer take.
            attempt_timeout_s: limit of one attempt, its rewards included.
            aborts: one for each engine, which end requests of attempts that are over. None lets them run.
            aside_share: greatest fraction of the attempts under way that are of tasks aside.
        """
        self._rewards = Busy()
        sides = replace(
            sides, score=self._rewards.during(sides.score), score_group=self._rewards.during(sides.score_group)
        )
        self._sides, self._attempt_timeout_s = sides, attempt_timeout_s
        self._turns = Turns(sides, environment or EnvironmentConfig(), run_seed=run_seed, max_positions=max_positions)
        self._queues = [
            EngineQueue(
                ask, max_calls=max_calls, lost=lambda error, engine=engine: self._lose(engine, error), abort=abort
            )
            for engine, (ask, abort) in enumerate(zip(asks, aborts or [ignore] * len(asks), strict=True))
        ]
        self._loads = Loads(len(asks))
        self._version = 0
        self._news = News()
        self._something = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while no attempt is under way, from the end of the first one on."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgotten: set[asyncio.Task[None]] = set()
        """Tasks that were cancelled and have not ended."""
        self._running: dict[str, Task] = {}
        """The groups under way, by their ids, with their progress."""
        self._begun: dict[int, float] = {}
        """Time at which each attempt under way began, by the identity of its rollout, those of tasks aside left out."""
        self._none_succeeded, self._num_failed = True, 0
        self._num_answers = 0
        """Number of answers of environments and rewards at the last look."""
        self._limits: dict[int, asyncio.Timeout] = {}
        """The limit of each attempt under way, by the identity of its rollout."""
        self._admission: Admission[Task] = Admission(aside_share)
        self._aside_share = aside_share
        self._is_interrupted = False
        self._left_s: dict[int, float] = {}
        """Seconds that attempts had left when they were interrupted, or began meanwhile."""

    def start(self, tasks: Sequence[Task], *, version: int) -> None:
        """Begins the attempts of some groups.

        Args:
            version: the proved version of every engine. No token may be older.
        """
        self._version = version
        others = [task for task in tasks if not task.aside]
        self._admission.begin(sum(map(left_of, others)))
        self._begin(others)
        for task in tasks:
            if task.aside:
                self._admission.wait(task, size=left_of(task))
        self._begin(self._admission.admitted())

    def hurry(self) -> None:
        """Begins all tasks aside that wait."""
        self._admission.lift()
        self._begin(self._admission.admitted())

    def _begin(self, tasks: Sequence[Task]) -> None:
        # Attempts of one group share an engine, because their prompt is prefilled once there. Later turns stay there,
        # where their prefix may be cached.
        loads = [size(task.group, max_tokens=task.sampling.max_tokens) for task in tasks]
        for task, engine, load in zip(tasks, self._loads.deal(loads), loads, strict=True):
            running = task.begun()
            self._running[task.group.id] = running
            self._idle.clear()
            self._keep(self._attempt_all(running, engine, load=load))

    def replace(self, engine: int, ask: Ask, abort: Abort = ignore) -> None:
        """Replaces a dead engine; see `EngineQueue.replace`."""
        # Nobody needs to learn of its death any more: the one to restart would be the new one.
        self._news.lost = [lost for lost in self._news.lost if lost.engine != engine]
        self._queues[engine].replace(ask, abort)

    def interrupt(self) -> None:
        """Sends no further request until `release`, and expects the engines to abort those that are under way. The time
        until then does not count against the limit of an attempt."""
        self._is_interrupted = True
        for queue in self._queues:
            queue.hold()
        now_s = asyncio.get_running_loop().time()
        for attempt, limit in self._limits.items():
            if (when := limit.when()) is not None and not limit.expired():
                self._left_s[attempt] = when - now_s
                limit.reschedule(None)

    async def snapshot(self) -> list[Task]:
        """Returns the groups under way with the tokens that they have, after `interrupt` and the engines' aborts."""
        await self.hold()
        # Attempts take what the aborted requests had sampled before they wait for the next request.
        await asyncio.sleep(0)
        return [
            replace(
                task,
                group=replace(task.group, rollouts=[replace(rollout) for rollout in task.group.rollouts]),
                progress=tuple(replace(progress) for progress in task.progress),
            )
            for task in self._running.values()
        ]

    async def hold(self) -> None:
        """Sends no further request until `release`. Returns when the engines have answered all others."""
        for queue in self._queues:
            queue.hold()
        for queue in self._queues:
            await queue.idle()

    def release(self) -> None:
        """Undoes `hold` and `interrupt`."""
        for queue in self._queues:
            queue.release()
        self._is_interrupted = False
        left_s, self._left_s = self._left_s, {}
        for attempt, seconds in left_s.items():
            if attempt in self._limits:
                self._limits[attempt].reschedule(asyncio.get_running_loop().time() + seconds)

    def cancel(self) -> None:
        """Forgets all attempts, and undoes `hold` and `interrupt`. Engines are told to abort their requests until they
        have none of them."""
        for task in self._tasks:
            task.cancel()
        # One may have failed already, with nobody told: that is past too.
        self._forgotten |= self._tasks
        self._tasks = set()
        self._news, self._turns.events = News(), Counter()
        self._loads = Loads(len(self._queues))
        self._running.clear()
        self._admission = Admission(self._aside_share)
        self._is_interrupted = False
        for queue in self._queues:
            queue.forget()

    async def news(self, wait_s: float) -> News:
        """Returns what has happened since the last call. Waits at most `wait_s` seconds for something to happen."""
        try:
            await asyncio.wait_for(self._something.wait(), wait_s)
            await asyncio.wait_for(self._idle.wait(), GATHER_S)
        except TimeoutError:
            pass
        self._something.clear()
        news, self._news = self._news, News()
        news.events, self._turns.events = self._turns.events, Counter()
        news.busy = [engine for engine, queue in enumerate(self._queues) if queue.is_busy]
        news.load = self.load()
        news.waits = self._turns.waits()
        before, self._num_answers = self._num_answers, self._rewards.num_ended + self._turns.num_answers
        news.progresses = self._num_answers > before
        return news

    async def score(self, groups: Sequence[Group]) -> None:
        """Fills the rewards of groups that were not attempted here."""
        await asyncio.gather(*(self._sides.score(rollout) for rollout in members(groups)))
        await asyncio.gather(*(self._sides.score_group(group.rollouts) for group in groups))

    def warn(self, level: int, text: str) -> None:
        """Passes a message to the user on."""
        self._news.warnings.append((level, text))

    def load(self) -> Load:
        """Returns how busy engines and rewards were so far."""
        now_s = time.monotonic()
        return Load(
            now_s=now_s,
            busy_s=[queue.busy_s(now_s) for queue in self._queues],
            rewards_busy_s=self._rewards.seconds(now_s),
        )

    def state(self) -> State:
        """Returns how many attempts are under way, those of tasks aside left out, and how busy the engines were so
        far."""
        counts = dict.fromkeys(map(str, WaitsFor), 0)
        for task in self._running.values():
            for progress in task.progress:
                if not (progress.ended or task.aside):
                    counts[progress.waits_for] += 1
        load = self.load()
        return State(
            now_s=load.now_s,
            busy_s=load.busy_s,
            rewards_busy_s=load.rewards_busy_s,
            attempts=counts,
            oldest_s=max((load.now_s - begun for begun in self._begun.values()), default=0.0),
        )

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        is_forgotten = task in self._forgotten
        self._tasks.discard(task)
        self._forgotten.discard(task)
        if not task.cancelled() and (error := task.exception()) and not is_forgotten:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._news.failure is None:
            known = isinstance(error, RlframeError)
            self._news.failure = error if known else RlframeError(f"the runner of attempts failed: {error!r}")
        self._something.set()

    def _lose(self, engine: int, error: EngineLost) -> None:
        self._news.lost.append(Lost(engine=engine, call=error.call))
        self._something.set()

    async def _attempt_all(self, task: Task, engine: int, *, load: int) -> None:
        """Runs the attempts of a group and passes it on."""
        group = task.group
        await asyncio.gather(*(self._within_limits(task, *pair, engine) for pair in task.pairs() if not pair[1].ended))
        self._loads.finish(engine, load)
        await self._sides.score_group(task.finished())
        del self._running[group.id]
        by_end = task.ends()
        kept = by_end.pop(DONE, [])
        lost = {DropReason(reason): rollouts for reason, rollouts in by_end.items()}
        ended = Ended(group=replace(group, rollouts=kept), lost=lost)
        self._news.ended.append(ended)
        self._something.set()
        if not self._running:
            self._idle.set()

    async def _within_limits(self, task: Task, rollout: Rollout, progress: Progress, engine: int) -> None:
        """Runs one attempt to its end."""
        if not task.aside:
            self._begun[id(rollout)] = time.monotonic()
        limit, admission = asyncio.timeout(None if self._is_interrupted else self._attempt_timeout_s), self._admission
        if self._is_interrupted:
            self._left_s[id(rollout)] = self._attempt_timeout_s
        try:
            async with limit:
                self._limits[id(rollout)] = limit
                progress.ended = await self._attempt(task, rollout, progress, engine)
            if progress.ended == DONE:
                self._none_succeeded = False
            elif progress.ended == DropReason.FAILED and (failure := self._turns.last_failure):
                self._count_failure(rollout, failure)
        except TimeoutError as error:
            if not limit.expired():  # Of a tool, which has a limit of its own.
                self._count_failure(rollout, error)
                progress.ended = DropReason.FAILED
                return
            self.warn(
                logging.WARNING,
                f"an attempt at prompt {rollout.prompt.id} took longer than rollout.attempt_timeout_s="
                f"{self._attempt_timeout_s:g} and is left out",
            )
            progress.ended = DropReason.TIMED_OUT
        except (RlframeError, asyncio.CancelledError):
            raise
        except Exception as error:  # One rollout: what an environment raises ends its attempt only.
            self._count_failure(rollout, error)
            progress.ended = DropReason.FAILED
        finally:
            self._begun.pop(id(rollout), None)
            self._limits.pop(id(rollout), None)
            self._left_s.pop(id(rollout), None)
            admission.end(aside=task.aside)
            self._begin(self._admission.admitted())

    def _count_failure(self, rollout: Rollout, error: Exception) -> None:
        self._num_failed += 1
        if self._num_failed & (self._num_failed - 1) == 0:  # 1, 2, 4, ...
            text = f"attempt {self._num_failed} that failed, at prompt {rollout.prompt.id}: {error!r:.300}"
            self.warn(logging.WARNING, text)
        if self._none_succeeded and self._num_failed >= FAILED_AT_LEAST:
            counted = f"each of the first {self._num_failed} attempts has failed"
            raise RlframeError(f"{counted}; the last one: {error!r:.300}")

    async def _attempt(self, task: Task, rollout: Rollout, progress: Progress, engine: int) -> str:
        """Runs one attempt to its end. Returns how it ended."""

        async def sample(request: GenerationRequest) -> Completion:
            least = self._version
            completion = await self._queues[engine].generate(request)
            if len(completion.versions) and completion.versions.min() < least:
                raise WeightSyncFailed(
                    f"engine {engine} sampled with weights of version {completion.versions.min()}, expected at least "
                    f"{least}"
                )
            return completion

        return await self._turns.run(task, rollout, progress, sample)


def left_of(task: Task) -> int:
    """Returns the number of attempts of a task that have not ended."""
    return len(task.group.rollouts) - sum(bool(progress.ended) for progress in task.progress)
