"""The reward runner: scores rollouts in a pool of processes, and by judges in the event loop of a thread.

A reward that hangs, raises or crashes is one failed sample.
"""

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rlframe.processes.pool import Pool
from rlframe.processes.work import Failed, Limits, PoolError
from rlframe.rewards.base import Attempt, Scores, is_judging, part_faults
from rlframe.rewards.config import FIRST_CALL_S, Per, RewardConfig
from rlframe.rewards.judging import Answer, Judges
from rlframe.rewards.scoring import Describing, Scoring, Task
from rlframe.types.rollout import Rollout, weighted_sum
from rlframe.types.turn import TurnRecord
from rlframe.types.wait import Wait
from rlframe.utils.errors import ConfigError, RewardError, RlframeError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)

NAME = "reward"
"""Name of the work in messages."""
TRIED_AT_LEAST = 64
"""Number of rollouts after which a part that has never given a score ends the run."""
Outcome = Scores | Failed
"""The scores that a part gives to an attempt, or why it gives none."""
FAILED = "failed"
"""Trouble of a part that gave no score and says no more about it."""


@dataclass(slots=True, eq=False)
class _Open:
    """Rollouts that are scored together, and that some parts have not scored yet: one, or those of a group."""

    rollouts: Sequence[Rollout]
    parts: Sequence[str]
    is_new: bool
    """Whether no other part has scored them before."""
    since_s: float
    """Time at which they were given, by time.monotonic."""
    outcomes: dict[str, Sequence[Outcome]] = field(default_factory=dict)
    """By part, one for each rollout."""
    troubles: dict[str, str] = field(default_factory=dict)


class RewardRunner:
    """Scores rollouts. Must be closed, or used as a context manager.

    Reward functions run in worker processes, judges in the event loop of a thread.
    """

    def __init__(self, config: RewardConfig, *, paid: bool = False):
        """Starts the workers without waiting for them.

        Args:
            paid: whether the environment gives each attempt a reward. One on which no part has a say then has that.

        Raises:
            ConfigError: no parts, an unknown reward or option.
        """
        if not config.parts:
            raise ConfigError([Fault("reward.parts", "must name at least one reward", got="none")])
        if faults := [
            fault for key, part in config.parts.items() for fault in part_faults(part, f"reward.parts.{key}")
        ]:
            raise ConfigError(faults)
        self._config = config
        self._paid = paid
        self._weights = {name: part.weight for name, part in config.parts.items()}
        self.failures: dict[str, int] = dict.fromkeys(config.parts, 0)
        """Failed samples by part, since the run or the last `score` began."""
        self._tried = dict.fromkeys(config.parts, 0)
        """Number of rollouts by part, for parts that have never given a score; see TRIED_AT_LEAST."""
        self._open: dict[int, tuple[str, _Open]] = {}
        """The part and the rollouts of each task that is not done, by its number."""
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        self._lock, self._closed = threading.Lock(), False
        judging = {name: part for name, part in config.parts.items() if is_judging(part)}
        working = {name: part for name, part in config.parts.items() if name not in judging}
        self._judges = Judges(judging, wake=self.wake) if judging else None
        self._pool = Pool(Scoring(working), _limits(config), size=config.workers, name=NAME) if working else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers and the judges. The runner cannot be used afterwards."""
        if self._pool:
            self._pool.close()
        if self._judges:
            self._judges.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wakes)
                os.close(self._wake)

    def wake(self) -> None:
        """Makes `take` return soon. May be called from any thread."""
        with self._lock:
            if not self._closed:
                os.write(self._wake, b"x")

    def parts(self, per: Per) -> list[str]:
        """Returns the names of the parts that are given an attempt, or a group, at a time."""
        return [name for name, part in self._config.parts.items() if part.per is per]

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Fills what the parts per attempt give to each rollout, and `failures`.

        Raises:
            RewardError: workers cannot be started. A reward that fails on a rollout never raises.
        """
        self.failures = dict.fromkeys(self._config.parts, 0)
        self.submit([[rollout] for rollout in rollouts], Per.ATTEMPT)
        while self._open:
            self.take()

    def score_groups(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Adds what the parts per group give to the rollouts of each group, after `score`. Raises as it does."""
        self.submit(groups, Per.GROUP)
        while self._open:
            self.take()

    def submit(self, units: Sequence[Sequence[Rollout]], per: Per) -> None:
        """Gives rollouts to be scored; `take` returns them, unless there are no such parts. Groups are given after each
        of their rollouts.

        Args:
            units: one rollout each, or the rollouts of a group.
        """
        if not (names := self.parts(per)):
            return
        is_new = per is Per.ATTEMPT or not self.parts(Per.ATTEMPT)
        tasks = [(name, [attempt_of(rollout) for rollout in unit]) for unit in units for name in names]
        numbers, now_s = self._give(tasks), time.monotonic()
        for unit in units:
            waiting = _Open(unit, names, is_new, now_s)
            self._open |= {next(numbers): (name, waiting) for name in names}

    def _give(self, tasks: Sequence[Task]) -> Iterator[int]:
        """Gives each task to the workers or to the judges. Returns their numbers; those of judges are negative."""
        judged = self._judges.names if self._judges else frozenset[str]()
        for_workers = [task for task in tasks if task[0] not in judged]
        numbers = iter(self._pool.submit(for_workers) if self._pool else ())
        return iter(
            [-self._judges.submit(*task) if self._judges and task[0] in judged else next(numbers) for task in tasks]
        )

    def take(self, wait_s: float = math.inf) -> list[Sequence[Rollout]]:
        """Returns units that were scored since the last call, what they got filled in. Waits for the first, or until
        `wake` is called.

        Raises:
            RlframeError: as `score`; or a part has failed on every rollout since the run began, and they are
                TRIED_AT_LEAST or more.
        """
        found = self._judged()
        found |= self._waited(0.0 if found else wait_s)
        scored = []
        for number, value in sorted(found.items()):
            part, unit = self._open.pop(number)
            outcomes: Any = value.outcomes if isinstance(value, Answer) else value
            if isinstance(value, Answer) and value.trouble:
                unit.troubles[part] = value.trouble
            unit.outcomes[part] = [outcomes] * len(unit.rollouts) if isinstance(outcomes, Failed) else outcomes
            if len(unit.outcomes) == len(unit.parts):
                self._fill(unit)
                scored.append(unit.rollouts)
        return scored

    def waits(self, is_awaited: Callable[[Sequence[Rollout]], bool]) -> list[Wait]:
        """Returns how many attempts wait for each part. May be called from any thread.

        Args:
            is_awaited: whether anybody waits for a unit, as it was submitted. Those whose attempts have ended meanwhile
                are not counted.
        """
        waiting: dict[str, list[_Open]] = {}
        # A copy, which is one step for the thread that changes it meanwhile.
        for part, unit in list(self._open.values()):
            if is_awaited(unit.rollouts):
                waiting.setdefault(part, []).append(unit)
        now_s = time.monotonic()
        return [
            Wait(
                number=sum(len(unit.rollouts) for unit in units),
                what=f"reward.parts.{part}",
                longest_s=now_s - min(unit.since_s for unit in units),
                limit=self._limit(part),
            )
            for part, units in sorted(waiting.items())
        ]

    def _limit(self, part: str) -> str:
        """Returns what limits a wait for a part; see Wait."""
        key, term = f"reward.parts.{part}", self._config.parts[part]
        if self._judges and part in self._judges.names:
            if term.timeout_s is None:
                return f"its calls have the limits of {key}.options"
            return f"a call may take {term.timeout_s:g} s: {key}.timeout_s"
        setting = "reward.timeout_s" if term.timeout_s is None else f"{key}.timeout_s"
        timeout_s = self._config.timeout_s if term.timeout_s is None else term.timeout_s
        num_workers = self._config.workers
        at_once = f"{num_workers} run at a time" if num_workers > 1 else "one runs at a time"
        return f"a call may take {timeout_s:g} s: {setting}; {at_once}: reward.workers"

    def _judged(self) -> dict[int, Any]:
        return {-number: answer for number, answer in self._judges.take().items()} if self._judges else {}

    def _waited(self, wait_s: float) -> dict[int, Any]:
        """Waits for results of workers or judges. Returns them."""
        found: dict[int, Any] = {}
        if self._pool:
            try:
                found = self._pool.take(wait_s, wake=self._wakes)
            except PoolError as error:
                raise RewardError(str(error)) from error
            for line in self._pool.printed():
                logger.info("a reward printed: %s", line)
        else:
            poll = select.poll()  # select takes no descriptor above 1023
            poll.register(self._wakes, select.POLLIN)
            poll.poll(None if math.isinf(wait_s) else math.ceil(1e3 * wait_s))
        try:
            while os.read(self._wakes, 1 << 16):
                pass
        except BlockingIOError:
            pass
        return found | self._judged()

    def _fill(self, unit: _Open) -> None:
        """Writes the parts' scores into the rollouts."""
        for place, rollout in enumerate(unit.rollouts):
            if unit.is_new:
                rollout.reward_parts, rollout.turn_parts = {}, {}
                rollout.reward_failed, rollout.reward_troubles = False, {}
            self._add(rollout, {name: unit.outcomes[name][place] for name in unit.parts}, unit.troubles)

    def _add(self, rollout: Rollout, outcomes: Mapping[str, Outcome], troubles: Mapping[str, str]) -> None:
        """Adds parts to a rollout. A failed part counts as 0; a part that gave None is left out."""
        failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failed)}
        for name, failure in failed.items():
            self.failures[name] += 1
            if self.failures[name] & (self.failures[name] - 1) == 0:  # 1, 2, 4, ...
                logger.warning("reward.parts.%s failed on prompt %s: %s", name, rollout.prompt.id, failure.why)
        by_turn = {name: list(outcome) for name, outcome in outcomes.items() if isinstance(outcome, Sequence)}
        by_turn = {name: values for name, values in by_turn.items() if any(value is not None for value in values)}
        sums = {name: math.fsum(value for value in values if value is not None) for name, values in by_turn.items()}
        plain = {name: 0.0 if name in failed else outcome for name, outcome in outcomes.items()}
        plain = {name: outcome for name, outcome in plain.items() if isinstance(outcome, float)}
        parts = {**rollout.reward_parts, **plain, **sums}
        rollout.reward_parts = {name: parts[name] for name in self._config.parts if name in parts}
        rollout.turn_parts = {**rollout.turn_parts, **by_turn}
        rollout.reward_weights = self._weights
        # Values of turns are rewards at tokens. A rollout that has only such is scored too.
        at_end = {name: 0.0 if name in rollout.turn_parts else value for name, value in rollout.reward_parts.items()}
        total = weighted_sum(at_end, self._weights)
        rollout.reward = 0.0 if self._paid and math.isnan(total) else total
        rollout.reward_failed |= bool(failed)
        rollout.reward_troubles = {**rollout.reward_troubles, **dict.fromkeys(failed, FAILED), **troubles}
        self._refuse_what_never_scores({name: name in failed or name in troubles for name in outcomes}, failed)

    def _refuse_what_never_scores(self, missing: Mapping[str, bool], failed: Mapping[str, Failed]) -> None:
        """Ends a run whose reward cannot work, instead of training on zeros.

        Args:
            missing: whether a part gave no score of its own.
        """
        for name, is_missing in missing.items():
            if name not in self._tried:
                continue
            if not is_missing:
                del self._tried[name]
                continue
            self._tried[name] += 1
            if self._tried[name] >= TRIED_AT_LEAST:
                why = f": {failed[name].why}" if name in failed else ""
                # Nothing that is refused before a run.
                raise RlframeError(
                    f"reward.parts.{name} has failed on each of the first {self._tried[name]} rollouts, so "
                    f"nothing can be learned from it{why}"
                )


def try_start(config: RewardConfig) -> dict[str, list[str]]:
    """Starts one worker with the rewards of `config`, and ends it again. Returns the fields of a record that each part
    needs.

    Raises:
        RewardError: the worker does not start; the message gives the reason.
    """
    names = list(config.parts)
    with Pool(Describing(config.parts), _limits(config), size=1, name=NAME) as pool:
        try:
            pool.try_start()
            needed = pool.run(names)
        except PoolError as error:
            raise RewardError(str(error)) from error
    return {name: each for name, each in zip(names, needed, strict=True) if not isinstance(each, Failed)}


def _limits(config: RewardConfig) -> Limits:
    return Limits(timeout_s=config.timeout_s, memory_gb=config.memory_gb, first_s=FIRST_CALL_S)


def attempt_of(rollout: Rollout) -> Attempt:
    """Returns what rewards see of a rollout."""
    turns = rollout.records or [TurnRecord(finish_reason=str(rollout.finish_reason))] * rollout.num_turns
    return Attempt(
        prompt_text=rollout.prompt.text,
        response_text=rollout.text,
        answer=rollout.prompt.answer,
        num_response_tokens=rollout.num_sampled_by_attempt,
        finish_reason=rollout.finish_reason,
        fields=rollout.prompt.fields,
        source=rollout.prompt.source,
        messages=rollout.messages or [*rollout.prompt.messages, {"role": "assistant", "content": rollout.text}],
        num_turns=len(turns),
        numbers=rollout.numbers,
        turns=turns,
        ending=rollout.ending,
    )
