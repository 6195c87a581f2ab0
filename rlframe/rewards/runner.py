"""The reward runner: scores rollouts in a pool of processes.

A reward that hangs, raises or crashes is one failed sample.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rlframe.processes.pool import Pool
from rlframe.processes.work import Failed, Limits, PoolError
from rlframe.rewards.base import Attempt, part_faults
from rlframe.rewards.config import RewardConfig
from rlframe.rewards.scoring import Scoring
from rlframe.types.rollout import Rollout, weighted_sum
from rlframe.utils.errors import ConfigError, RewardError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)

NAME = "reward"
"""Name of the work in messages."""
TRIED_AT_LEAST = 64
"""Number of rollouts after which a part that has never given a score ends the run."""
Outcome = float | str | None
"""A score, the text of a failure, or None if the part does not apply."""


@dataclass(slots=True, eq=False)
class _Open:
    """A rollout that some parts have not scored yet."""

    rollout: Rollout
    outcomes: dict[str, Outcome] = field(default_factory=dict)


class RewardRunner:
    """Scores rollouts. Must be closed, or used as a context manager."""

    def __init__(self, config: RewardConfig):
        """Starts the workers without waiting for them.

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
        self.failures: dict[str, int] = dict.fromkeys(config.parts, 0)
        """Failed samples by part, since the run or the last `score` began."""
        self._tried = dict.fromkeys(config.parts, 0)
        """Number of rollouts by part, for parts that have never given a score; see TRIED_AT_LEAST."""
        self._open: dict[int, tuple[str, _Open]] = {}
        """The part and the rollout of each task that is not done, by its number."""
        self._pool = Pool(Scoring(config.parts), _limits(config), size=config.workers, name=NAME)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. The runner cannot be used afterwards."""
        self._pool.close()

    def score(self, rollouts: list[Rollout]) -> None:
        """Fills `reward`, `reward_parts` and `reward_failed` of each rollout, and `failures`.

        Raises:
            RewardError: workers cannot be started. A reward that fails on a rollout never raises.
        """
        self.failures = dict.fromkeys(self._config.parts, 0)
        self.submit(rollouts)
        while self._open:
            self.take()

    def submit(self, rollouts: list[Rollout]) -> None:
        """Gives rollouts to be scored; `take` returns them."""
        parts = list(self._config.parts)
        attempts = [_attempt(rollout) for rollout in rollouts]
        numbers = iter(self._pool.submit([(key, attempt) for attempt in attempts for key in parts]))
        for rollout in rollouts:
            open_rollout = _Open(rollout)
            self._open |= {next(numbers): (key, open_rollout) for key in parts}

    def take(self, wait_s: float = math.inf, *, wake: int | None = None) -> list[Rollout]:
        """Returns rollouts that were scored since the last call, their rewards filled in.

        Args:
            wait_s, wake: see `Pool.take`.

        Raises:
            RewardError: as `score`; or a part has failed on every rollout since the run began, and they are
                TRIED_AT_LEAST or more.
        """
        try:
            found = self._pool.take(wait_s, wake=wake)
        except PoolError as error:
            raise RewardError(str(error)) from error
        for line in self._pool.printed():
            logger.info("a reward printed: %s", line)
        scored = []
        for number, value in sorted(found.items()):
            key, rollout = self._open.pop(number)
            rollout.outcomes[key] = value.why if isinstance(value, Failed) else value
            if len(rollout.outcomes) == len(self._config.parts):
                self._fill(rollout.rollout, {part: rollout.outcomes[part] for part in self._config.parts})
                scored.append(rollout.rollout)
        return scored

    def _fill(self, rollout: Rollout, outcomes: Mapping[str, Outcome]) -> None:
        """Writes the parts' scores into the rollout. A failed part counts as 0; a part that gave None is left out."""
        failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, str)}
        for key, why in failed.items():
            self.failures[key] += 1
            if self.failures[key] & (self.failures[key] - 1) == 0:  # 1, 2, 4, ...
                logger.warning("reward.parts.%s failed on prompt %s: %s", key, rollout.prompt.id, why)
        rollout.reward_parts = {
            key: 0.0 if isinstance(outcome, str) else outcome
            for key, outcome in outcomes.items()
            if outcome is not None
        }
        weights = {key: part.weight for key, part in self._config.parts.items()}
        rollout.reward_weights = weights
        rollout.reward = weighted_sum(rollout.reward_parts, weights)
        rollout.reward_failed = bool(failed)
        self._refuse_what_never_scores(outcomes)

    def _refuse_what_never_scores(self, outcomes: Mapping[str, Outcome]) -> None:
        """Ends a run whose reward cannot work, instead of training on zeros."""
        for key in list(self._tried):
            if not isinstance(outcomes[key], str):
                del self._tried[key]
                continue
            self._tried[key] += 1
            if self._tried[key] >= TRIED_AT_LEAST:
                raise RewardError(
                    f"reward.parts.{key} has failed on each of the first {self._tried[key]} rollouts, so "
                    f"nothing can be learned from it: {outcomes[key]}"
                )


def try_start(config: RewardConfig) -> None:
    """Starts one worker with the rewards of `config`, and ends it again.

    Raises:
        RewardError: the worker does not start; the message gives the reason.
    """
    with Pool(Scoring(config.parts), _limits(config), size=1, name=NAME) as pool:
        try:
            pool.try_start()
        except PoolError as error:
            raise RewardError(str(error)) from error


def _limits(config: RewardConfig) -> Limits:
    return Limits(timeout_s=config.timeout_s, memory_gb=config.memory_gb)


def _attempt(rollout: Rollout) -> Attempt:
    return Attempt(
        prompt_text=rollout.prompt.text,
        response_text=rollout.text,
        answer=rollout.prompt.answer,
        num_response_tokens=rollout.num_sampled_tokens,
        finish_reason=rollout.finish_reason,
        fields=rollout.prompt.fields,
        source=rollout.prompt.source,
        messages=rollout.messages or [*rollout.prompt.messages, {"role": "assistant", "content": rollout.text}],
        num_turns=len(rollout.turns),
        numbers=rollout.numbers,
    )
