"""Judging with a reward model: its score beside what reward functions say."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from rlframe.ops.packing import pack_sequences
from rlframe.rewards.config import LARGEST_SCORE, MODEL_PART
from rlframe.types.batch import Sequences
from rlframe.types.rollout import Rollout


class Scorer(Protocol):
    """Fills `reward`, `reward_parts` and `reward_failed` of rollouts: `RewardRunner`, or a RewardModelScorer."""

    def score(self, rollouts: list[Rollout]) -> None:
        """Judges all of them."""


@dataclass(kw_only=True)
class RewardModelScorer:
    """Adds the score of a reward model to the rewards of the functions."""

    functions: Scorer | None
    """What judges besides; None where the model judges alone."""
    scores: Callable[[Sequences], Float[Tensor, " R"]]
    """What the reward model says of each sequence."""
    weight: float
    """The score is multiplied by it in the sum; 0 only logs it."""
    make_room: Callable[[], None]
    """Called before the model computes: frees the memory of those that share its devices."""

    def score(self, rollouts: list[Rollout]) -> None:
        """Scores as Scorer says. A score that is absurd or not finite is 0 and a failed sample."""
        if self.functions:
            self.functions.score(rollouts)
        self.make_room()
        scores = self.scores(pack_sequences(rollouts)).tolist()
        for rollout, score in zip(rollouts, scores, strict=True):
            sane = math.isfinite(score) and abs(score) <= LARGEST_SCORE
            before = 0.0 if math.isnan(rollout.reward) else rollout.reward
            rollout.reward_parts = {**rollout.reward_parts, MODEL_PART: score if sane else 0.0}
            rollout.reward_weights = {**rollout.reward_weights, MODEL_PART: self.weight}
            rollout.reward = before + self.weight * rollout.reward_parts[MODEL_PART]
            rollout.reward_failed |= not sane
