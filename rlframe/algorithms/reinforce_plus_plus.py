"""REINFORCE++, and its form with the group's mean as baseline.

Source: Hu et al. 2025, arXiv 2501.03262. Plain: the score is given at the last token, the KL to the reference is
subtracted from the reward at each token, and the returns of all tokens of the batch are whitened together; no group is
needed. With `group_baseline`: (score - mean of the group) - KL of the token, whitened in the same way (as in OpenRLHF
and slime; verl subtracts the KL, summed over tokens, from the score before the group's mean).
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, check_groups, on_tokens
from rlframe.ops.advantages import (
    NormalizeBy,
    discounted_returns,
    group_advantages,
    over_attempts,
    rewards_by_sequence,
    rewards_by_token,
    whiten,
)
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class ReinforcePlusPlusConfig(ClippedConfig):
    """REINFORCE++'s settings."""

    name: str = "reinforce_plus_plus"
    """Name of the algorithm."""
    group_baseline: bool = False
    """Whether the group's mean is subtracted from the scores first. Returns are then not summed over tokens."""
    discount: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Discount of a reward one token later. Only without group_baseline."""
    kl_in_reward: bool = True
    """Whether the KL of the policy that sampled is subtracted from the reward at each token. Otherwise the KL is a term
    of the loss."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Estimator of the KL."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if self.group_baseline:
            check_groups(self)
            if self.discount != 1:
                raise SettingError("discount", "has no effect with group_baseline", got=self.discount, hint="remove it")


class ReinforcePlusPlus(ClippedPolicyGradient[ReinforcePlusPlusConfig]):
    """Clipped policy gradient with returns whitened over the batch."""

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] whitened returns, or, with `group_baseline`, whitened centred scores minus the KL."""
        penalty = self.kl_penalty(batch)
        if self.config.group_baseline:
            centred = over_attempts(
                partial(group_advantages, by=NormalizeBy.NONE), rewards_by_sequence(batch), batch=batch
            )
            return whiten(on_tokens(centred, batch) - penalty, batch.loss_mask)
        rewards = rewards_by_token(batch) - penalty
        return whiten(discounted_returns(rewards, batch, discount=self.config.discount), batch.loss_mask)


COMPONENT, CONFIG = ReinforcePlusPlus, ReinforcePlusPlusConfig
