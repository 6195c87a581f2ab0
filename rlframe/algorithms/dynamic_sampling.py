"""Dynamic sampling: groups without a signal are dropped and replaced. The rule; the loop's sampler applies it.

Source: Yu et al. 2025, arXiv 2503.14476 (DAPO), section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlframe.types.rollout import Rollout

RIGHT, WRONG = 1.0, 0.0
"""Rewards of a right and of a wrong answer, where the reward is accuracy."""


class Flat(StrEnum):
    """Why all rewards of a group are equal."""

    ALL_RIGHT = "all_right"
    """Each is 1 or more."""
    ALL_WRONG = "all_wrong"
    """Each is 0 or less."""
    OTHER = "other"
    """Each is the same number in between."""


@dataclass(kw_only=True, slots=True)
class DynamicSamplingConfig:
    """Sample until every group of the batch has a signal."""

    reward_part: str | None = None
    """Name in reward.parts of the reward that must differ within a group, such as the accuracy beside a penalty of
    length; the weighted sum when null."""
    max_rounds: int = 10
    """A step samples at most so many times, each time as many prompts as are missing. A batch that is not full by then
    is trained as it is, in whole minibatches; one without a group that fills a minibatch ends the run."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, got {self.max_rounds}")


def flat(group: Sequence[Rollout], reward_part: str | None) -> Flat | None:
    """Why the group has no signal; None when its rewards differ."""
    rewards = [rollout.reward if reward_part is None else rollout.reward_parts[reward_part] for rollout in group]
    if min(rewards) != max(rewards):
        return None
    if rewards[0] >= RIGHT:
        return Flat.ALL_RIGHT
    return Flat.ALL_WRONG if rewards[0] <= WRONG else Flat.OTHER
