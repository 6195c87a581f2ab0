"""On-policy distillation: the policy samples, and each token is rewarded by how much more likely the teacher finds it.

Source: Agarwal et al. 2024, arXiv 2306.13649, section 3.1 (reverse KL on the student's own samples); as a policy
gradient, Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation. The advantage of a token is -(log pi_S - log
pi_T) at the sampled token, detached. Its expected gradient is that of KL(pi_S || pi_T) one token ahead. Every other
policy gradient can add the same term to its own advantages: `distillation_coefficient`.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import (
    ClippedConfig,
    ClippedPolicyGradient,
    Coefficient,
    GroupNormalized,
    GroupSize,
    check_groups,
    refuse_changed,
)
from rlframe.types.batch import Batch
from rlframe.utils.bounds import Range


@dataclass(kw_only=True, slots=True)
class OnPolicyDistillationConfig(GroupNormalized, ClippedConfig):
    """On-policy distillation's settings."""

    name: str = "on_policy_distillation"
    """Name of the algorithm."""
    group_size: GroupSize = 1
    """Number of rollouts G per prompt."""
    distillation_coefficient: Annotated[float, Range(above=0, maximum=1e4)] = 1.0
    """Weight of the teacher in the advantages."""
    reward_coefficient: Coefficient = 0.0
    """Weight of the group's normalised reward in the advantages. 0 needs no reward."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if self.reward_coefficient:
            check_groups(self, where=f" with reward_coefficient={self.reward_coefficient:g}")
        else:
            rewards = ("kl_in_reward", "normalize_by", "credit", "dynamic_sampling")
            refuse_changed(self, *rewards, why="with reward_coefficient=0")


class OnPolicyDistillation(ClippedPolicyGradient[OnPolicyDistillationConfig]):
    """Policy gradient whose advantages come from the teacher, and from rewards if there are any."""

    def __init__(self, config: OnPolicyDistillationConfig):
        super().__init__(config)
        self.needs_rewards = config.reward_coefficient > 0

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] the part of the advantages that comes from rewards. `PolicyGradient.train_batch` adds the
        teacher's part."""
        if not self.needs_rewards:
            return torch.zeros(batch.num_tokens)
        return self.config.reward_coefficient * super().advantages(batch)


COMPONENT, CONFIG = OnPolicyDistillation, OnPolicyDistillationConfig
