"""The work of reward workers: scoring one attempt by one part. Light: imports no reward before it is asked for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real

from rlframe.processes.work import TaskFailed, Work
from rlframe.rewards.base import Attempt, Reward, build_reward
from rlframe.rewards.config import LARGEST_SCORE, RewardTerm

Task = tuple[str, Attempt]
"""Name of a part, and the attempt that it scores."""


@dataclass(frozen=True, slots=True)
class Scoring(Work):
    """The rewards of some parts."""

    parts: Mapping[str, RewardTerm]

    def prepare(self) -> Callable[[Task], float | None]:
        """Builds all rewards, which imports the user's code, and returns the function that scores a task."""
        rewards = {name: build_reward(part, key=f"reward.parts.{name}") for name, part in self.parts.items()}

        def run(task: Task) -> float | None:
            part, attempt = task
            return score(rewards[part], attempt)

        return run


def score(reward: Reward, attempt: Attempt) -> float | None:
    """Returns the score, or None where the reward gives none.

    Raises:
        TaskFailed: what the reward gave is no score.
    """
    found = reward.score(attempt)
    if found is None:
        return None
    if not isinstance(found, Real) or not math.isfinite(found) or abs(found) > LARGEST_SCORE:
        raise TaskFailed(
            f"a reward must be a finite number of at most {LARGEST_SCORE:g} in size, or None, got {found!r:.60}"
        )
    return float(found)
