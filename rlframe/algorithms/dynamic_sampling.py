"""Dynamic sampling: groups without a signal are dropped and replaced. This file holds the rule, which the loop's
sampler applies.

Source: Yu et al. 2025, arXiv 2503.14476 (DAPO), section 3.2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np

from rlframe.types.rollout import Rollout, attempts_in, reward_of
from rlframe.utils.bounds import Range, check_bounds

RIGHT, WRONG = 1.0, 0.0
"""Rewards of a right and of a wrong answer, if the reward is accuracy."""


class Flat(StrEnum):
    """The reason why all rewards of a group are equal."""

    ALL_RIGHT = "all_right"
    """Each is 1 or more."""
    ALL_WRONG = "all_wrong"
    """Each is 0 or less."""
    OTHER = "other"
    """Each is the same number in between."""
    UNSCORED = "unscored"
    """No reward function, or not the one that must differ, scored any rollout."""


@dataclass(kw_only=True, slots=True)
class DynamicSamplingConfig:
    """Settings of dynamic sampling: sample until every group of the batch has a signal."""

    reward_part: str | None = None
    """Name in reward.parts of the reward that must differ within a group, such as the accuracy when there is also a
    length penalty. null means the weighted sum."""
    max_rounds: Annotated[int, Range(1, 10**6)] = 10
    """Greatest number of times that a step samples, each time as many prompts as are missing. A batch that is not
    full afterwards is trained as it is, in whole minibatches. A batch without a group that fills a minibatch ends
    the run."""

    def __post_init__(self) -> None:
        check_bounds(self)


def flat(group: Sequence[Rollout], reward_part: str | None) -> Flat | None:
    """Returns the reason why the group has no signal, or None if the rewards of scored rollouts differ."""
    rewards = [
        reward_of(sequences) if reward_part is None else sequences[-1].reward_parts.get(reward_part, math.nan)
        for sequences in attempts_in(group)
    ]
    # In the format of a batch, in which rounding of a sum of parts is no signal.
    rewards = [np.float32(reward) for reward in rewards if not math.isnan(reward)]
    if not rewards:
        return Flat.UNSCORED
    if min(rewards) != max(rewards):
        return None
    if rewards[0] >= RIGHT:
        return Flat.ALL_RIGHT
    return Flat.ALL_WRONG if rewards[0] <= WRONG else Flat.OTHER
