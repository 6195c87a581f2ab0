"""Proximal policy optimization with a critic.

Source: Schulman et al. 2017, arXiv 1707.06347, equation 7 for the surrogate; generalized advantage estimation: Schulman
et al. 2015, arXiv 1506.02438; for language models Ouyang et al. 2022, arXiv 2203.02155: the score comes at the last
token, and the KL to the reference comes off the reward at each token. The critic is a second model with losses and an
optimizer of its own, so the paper's coefficient of the value loss has no counterpart.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.critic import Critic
from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient
from rlframe.ops.advantages import last_token_rewards, whiten
from rlframe.ops.gae import after_sequences, before_tokens, generalized_advantages
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class PpoConfig(ClippedConfig):
    """PPO's settings. Those of the critic's model, layout and optimizer are in `critic`."""

    name: str = "ppo"
    """The algorithm."""
    discount: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """gamma: what a reward one token later counts."""
    gae_lambda: Annotated[float, Range(0, 1)] = 1.0
    """lambda of generalized advantage estimation: 1 believes the rewards, 0 the critic's value of the next state."""
    bootstrap_truncated: bool = False
    """What a rollout that was cut off would still have earned is the critic's value of its last state. false: nothing,
    as for one that ended by itself, for a score that has judged the cut text already."""
    whiten_advantages: bool = True
    """Advantages of the whole batch get mean 0 and variance 1; returns are never whitened."""
    value_clip: Annotated[float, Range(above=0, maximum=1e9, note="null for no clipping")] | None = 0.2
    """The critic's loss sees values at most this far from those before the update; null does not clip. Matters from
    the second optimizer step on a batch on."""
    critic_warmup_steps: Annotated[int, Range(0, 10**9)] = 0
    """First steps of the run that train the critic only; engines are still given each step's version, the weights in
    it stay those the run began with."""
    kl_in_reward: bool = True
    """true: the KL of the policy that sampled comes off the reward at each token. false: it is a term of the loss."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Which estimate of the KL."""

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
        value. A rollout whose reward is NaN has advantage 0, so that the critic is told what it says."""
        config, after = self.config, values[:, 0]
        before = before_tokens(after, batch)
        final = torch.zeros(batch.num_sequences)
        if config.bootstrap_truncated:
            assert batch.truncated is not None
            final = torch.where(batch.truncated, after_sequences(after, batch), 0.0)
        advantages = generalized_advantages(
            last_token_rewards(batch.rewards, batch) - self.kl_penalty(batch),
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
