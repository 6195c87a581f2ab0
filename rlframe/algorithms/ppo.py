"""Proximal policy optimization with a critic.

Source: Schulman et al. 2017, arXiv 1707.06347, equation 7 for the surrogate; generalized advantage estimation: Schulman
et al. 2015, arXiv 1506.02438; for language models Ouyang et al. 2022, arXiv 2203.02155: the score is given at the last
token, and the KL to the reference is subtracted from the reward at each token. The critic is a second model with losses
and an optimizer of its own, so the paper's coefficient of the value loss has no counterpart.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.critic import Critic
from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient
from rlframe.ops.advantages import rewards_by_token, whiten
from rlframe.ops.gae import after_sequences, before_tokens, generalized_advantages
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class PpoConfig(ClippedConfig):
    """PPO's settings. The critic's model, layout and optimizer are settings of `critic`."""

    name: str = "ppo"
    """Name of the algorithm."""
    discount: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Discount gamma of a reward one token later."""
    gae_lambda: Annotated[float, Range(0, 1)] = 1.0
    """Parameter lambda of generalized advantage estimation: 1 uses the rewards only, 0 the critic's value of the next
    state."""
    bootstrap_truncated: bool = False
    """Whether the critic's value of the last state stands for the further rewards of a rollout that was cut off. false
    means none, as for a rollout that ended by itself, because the score has already judged the truncated text."""
    whiten_advantages: bool = True
    """Whether advantages of the whole batch are scaled to mean 0 and variance 1. Returns are never whitened."""
    value_clip: Annotated[float, Range(above=0, maximum=1e9, note="null for no clipping")] | None = 0.2
    """Greatest difference between values in the critic's loss and those before the update. null means no clipping. It
    has an effect from the second optimizer step on a batch."""
    critic_warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    """Number of steps at the start of the run that train the critic only. Engines still receive each step's version,
    whose weights are those at the start of the run."""
    kl_in_reward: bool = True
    """Whether the KL of the policy that sampled is subtracted from the reward at each token. Otherwise the KL is a term
    of the loss."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Estimator of the KL."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        if self.bootstrap_truncated and self.mask_truncated:
            raise SettingError(
                "bootstrap_truncated", "has no effect with mask_truncated", got="true", hint="remove one of the two"
            )


class Ppo(ClippedPolicyGradient[PpoConfig]):
    """Clipped policy gradient with a critic's values as baseline."""

    def __init__(self, config: PpoConfig):
        super().__init__(config)
        self.critic_warmup_steps = config.critic_warmup_steps
        self.critic = Critic(
            aggregation=config.aggregation, constant_length=config.constant_length, clip=config.value_clip
        )

    def with_values(self, batch: Batch, values: Float[Tensor, "T 1"]) -> Batch:
        """Returns the batch with the values of the states before its tokens, and returns: advantage, not whitened, +
        value. A rollout whose reward is NaN has advantage 0, so that the critic's target is its own value."""
        config, after = self.config, values[:, 0]
        before = before_tokens(after, batch)
        final = torch.zeros(batch.num_sequences)
        if config.bootstrap_truncated:
            assert batch.truncated is not None
            final = torch.where(batch.truncated, after_sequences(after, batch), 0.0)
        advantages = generalized_advantages(
            rewards_by_token(batch) - self.kl_penalty(batch),
            before,
            batch,
            discount=config.discount,
            gae_lambda=config.gae_lambda,
            final_values=final,
        )
        unscored = torch.repeat_interleave(batch.rewards.isnan(), batch.lengths)
        advantages = advantages.masked_fill(unscored, 0.0)
        return replace(batch, values=before, returns=torch.where(batch.loss_mask, advantages + before, 0.0))

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] returns - values, whitened over the batch unless switched off."""
        assert batch.values is not None and batch.returns is not None
        advantages = torch.where(batch.loss_mask, batch.returns - batch.values, 0.0)
        return whiten(advantages, batch.loss_mask) if self.config.whiten_advantages else advantages


COMPONENT, CONFIG = Ppo, PpoConfig
