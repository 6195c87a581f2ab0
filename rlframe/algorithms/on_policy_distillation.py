"""On-policy distillation: the policy samples, and each token is judged by how much likelier the teacher finds it.

Source: Agarwal et al. 2024, arXiv 2306.13649, section 3.1 (reverse KL on the student's own samples); as a policy
gradient, Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation. The advantage of a token is
-(log pi_S - log pi_T) at the sampled token, detached, whose expected gradient is that of KL(pi_S || pi_T) one token
ahead. Every other policy gradient takes the same term beside its own advantages: `distillation_coefficient`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, on_tokens
from rlframe.ops.advantages import group_advantages
from rlframe.types.batch import Batch


@dataclass(kw_only=True, slots=True)
class OnPolicyDistillationConfig(ClippedConfig):
    """On-policy distillation's settings."""

    name: str = "on_policy_distillation"
    """The algorithm."""
    group_size: int = 1
    """G, rollouts per prompt."""
    distillation_coefficient: float = 1.0
    """Weight of the teacher in the advantages."""
    reward_coefficient: float = 0.0
    """Weight of the group's normalised reward in the advantages; 0 needs no reward."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if self.distillation_coefficient <= 0:
            raise ValueError(f"distillation_coefficient must be above 0 here, got {self.distillation_coefficient}")
        if self.reward_coefficient < 0:
            raise ValueError(f"reward_coefficient must be at least 0, got {self.reward_coefficient}")
        if self.reward_coefficient:
            self.needs_groups()
        elif self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")


class OnPolicyDistillation(ClippedPolicyGradient[OnPolicyDistillationConfig]):
    """Policy gradient whose advantages are the teacher's, and rewards' if there are any."""

    def __init__(self, config: OnPolicyDistillationConfig):
        super().__init__(config)
        self.needs_rewards = config.reward_coefficient > 0

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] what rewards have to say; the teacher's part comes on top, see `PolicyGradient.train_batch`."""
        if not self.needs_rewards:
            return torch.zeros(batch.num_tokens)
        centred = group_advantages(batch.rewards, batch.group, normalize=True)
        return self.config.reward_coefficient * on_tokens(centred, batch)


COMPONENT, CONFIG = OnPolicyDistillation, OnPolicyDistillationConfig
