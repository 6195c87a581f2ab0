"""REINFORCE leave-one-out.

Source: Ahmadian et al. 2024, arXiv 2402.14740: the baseline of a rollout is the mean reward of the others of
its group, the whole rollout is one action (hence the default aggregation), and the KL to the reference, summed over its
tokens, comes off the reward before the baseline. At ratio one the clipped surrogate has the paper's gradient; the clip
is for several updates per batch, as in verl.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, on_tokens
from rlframe.ops.advantages import leave_one_out_advantages
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch


@dataclass(kw_only=True, slots=True)
class RlooConfig(ClippedConfig):
    """RLOO's settings."""

    name: str = "rloo"
    """The algorithm."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM
    """How token losses become one number."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the frozen reference, taken off the reward; 0 needs no reference."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Which estimate of the KL."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        self.needs_groups()
        self.kl_is_in_the_reward()


class Rloo(ClippedPolicyGradient[RlooConfig]):
    """Policy gradient with the mean reward of the group's other rollouts as baseline."""

    kl_in_reward = True

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] (reward - KL of the rollout) minus the mean of that over the group's others."""
        kl = torch.zeros(batch.num_sequences).index_add_(0, batch.sequence_index(), self.kl_penalty(batch))
        return on_tokens(leave_one_out_advantages(batch.rewards - kl, batch.group), batch)


COMPONENT, CONFIG = Rloo, RlooConfig
