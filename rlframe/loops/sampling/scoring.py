"""Scoring with a reward model, whose score is added to the reward functions'."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from rlframe.ops.packing import pack_sequences
from rlframe.rewards.config import LARGEST_SCORE, MODEL_PART
from rlframe.types.batch import Sequences
from rlframe.types.rollout import Group, Rollout, attempts_in, members


class Scorer(Protocol):
    """Sets `reward`, `reward_parts` and `reward_failed` of rollouts; implemented by `RewardModelScorer`."""

    def score(self, rollouts: list[Rollout]) -> None:
        """Scores all rollouts."""


def score_attempts(scorer: Scorer, groups: Iterable[Group]) -> None:
    """Scores the last sequence of each attempt, if there are any. The earlier ones get its reward."""
    attempts = attempts_in(members(groups))
    if attempts:
        scorer.score([sequences[-1] for sequences in attempts])
    for *earlier, last in attempts:
        for each in earlier:
            each.take_rewards(last)


@dataclass(kw_only=True)
class RewardModelScorer:
    """Adds the score of a reward model to the rewards of the functions."""

    scores: Callable[[Sequences], Float[Tensor, " R"]]
    """Returns the reward model's score of each sequence."""
    weight: float
    """Factor of the score in the sum. 0 only logs it."""
    sleep_others: Callable[[], None]
    """Called before the model computes. Frees the memory of roles that share its devices."""

    def score(self, rollouts: list[Rollout]) -> None:
        """Scores as Scorer does. A score that is not finite or is absurdly large counts as 0 and as a failed sample."""
        self.sleep_others()
        scores = self.scores(pack_sequences(rollouts)).tolist()
        for rollout, score in zip(rollouts, scores, strict=True):
            sane = math.isfinite(score) and abs(score) <= LARGEST_SCORE
            rollout.reward_parts = {**rollout.reward_parts, MODEL_PART: score if sane else 0.0}
            rollout.reward_weights = {**rollout.reward_weights, MODEL_PART: self.weight}
            if self.weight:
                before = 0.0 if math.isnan(rollout.reward) else rollout.reward
                rollout.reward = before + self.weight * rollout.reward_parts[MODEL_PART]
            rollout.reward_failed |= not sane
