"""REINFORCE++, and its form with the group's mean as baseline.

Source: Hu et al. 2025, arXiv 2501.03262. Plain: the score comes at the last token, the KL to the reference comes
off the reward at each token, and the returns of all tokens of the batch are whitened together; no group is needed. With
`group_baseline`: (score - mean of the group) - KL of the token, whitened likewise (as OpenRLHF and slime have it; verl
takes the KL, summed over tokens, off the score before the group's mean).
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient, check_groups, on_tokens
from rlframe.ops.advantages import NormalizeBy, discounted_returns, group_advantages, last_token_rewards, whiten
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class ReinforcePlusPlusConfig(ClippedConfig):
    """REINFORCE++'s settings."""

    name: str = "reinforce_plus_plus"
    """The algorithm."""
    group_baseline: bool = False
    """Take the group's mean off the scores first; returns are then not summed over tokens."""
    discount: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """What a reward one token later counts; only without group_baseline."""
    kl_in_reward: bool = True
    """true: the KL of the policy that sampled comes off the reward at each token. false: it is a term of the loss."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Which estimate of the KL."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if self.group_baseline:
            check_groups(self)
            if self.discount != 1:
                raise SettingError("discount", "has no effect with group_baseline", got=self.discount, hint="remove it")


class ReinforcePlusPlus(ClippedPolicyGradient[ReinforcePlusPlusConfig]):
    """Clipped policy gradient with returns whitened over the batch."""

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] whitened returns, or whitened centred scores less the KL with `group_baseline`."""
        penalty = self.kl_penalty(batch)
        if self.config.group_baseline:
            centred = group_advantages(batch.rewards, batch.group, by=NormalizeBy.NONE)
            return whiten(on_tokens(centred, batch) - penalty, batch.loss_mask)
        rewards = last_token_rewards(batch.rewards, batch) - penalty
        return whiten(discounted_returns(rewards, batch, discount=self.config.discount), batch.loss_mask)


COMPONENT, CONFIG = ReinforcePlusPlus, ReinforcePlusPlusConfig
