"""Proximal policy optimization with a critic.

Source: Schulman et al. 2017, arXiv 1707.06347, equation 7 for the surrogate; generalized advantage estimation: Schulman
et al. 2015, arXiv 1506.02438; for language models Ouyang et al. 2022, arXiv 2203.02155: the score comes at the last
token, and the KL to the reference comes off the reward at each token. The critic is a second model with losses and an
optimizer of its own, so the paper's coefficient of the value loss has no counterpart.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.critic import Critic
from rlframe.algorithms.policy_gradient import ClippedConfig, ClippedPolicyGradient
from rlframe.ops.advantages import last_token_rewards, whiten
from rlframe.ops.gae import after_sequences, before_tokens, generalized_advantages
from rlframe.ops.kl import KlEstimator
from rlframe.types.batch import Batch


@dataclass(kw_only=True, slots=True)
class PpoConfig(ClippedConfig):
    """PPO's settings. Those of the critic's model, layout and optimizer are in `critic`."""

    name: str = "ppo"
    """The algorithm."""
    discount: float = 1.0
    """gamma: what a reward one token later counts."""
    gae_lambda: float = 1.0
    """lambda of generalized advantage estimation: 1 believes the rewards, 0 the critic's value of the next state."""
    bootstrap_truncated: bool = False
    """What a rollout that was cut off would still have earned is the critic's value of its last state. false: nothing,
    as for one that ended by itself, for a score that has judged the cut text already."""
    whiten_advantages: bool = True
    """Advantages of the whole batch get mean 0 and variance 1; returns are never whitened."""
    value_clip: float | None = 0.2
    """The critic's loss sees values at most this far from those before the update; null does not clip. Matters from
    the second optimizer step on a batch on."""
    critic_warmup_steps: int = 0
    """First steps of the run that train the critic only; engines are still given each step's version, the weights in
    it stay those the run began with."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the frozen reference, taken off the reward at each token; 0 needs no reference."""
    kl_estimator: KlEstimator = KlEstimator.K1
    """Which estimate of the KL."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        self.kl_is_in_the_reward()
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        if not 0 < self.discount <= 1:
            raise ValueError(f"discount must lie in (0, 1], got {self.discount}")
        if not 0 <= self.gae_lambda <= 1:
            raise ValueError(f"gae_lambda must lie in [0, 1], got {self.gae_lambda}")
        if self.value_clip is not None and self.value_clip <= 0:
            raise ValueError(f"value_clip must be above 0, or null for no clipping, got {self.value_clip}")
        if self.bootstrap_truncated and self.mask_truncated:
            raise ValueError("bootstrap_truncated has no effect with mask_truncated, got true; remove one of the two")
        if self.critic_warmup_steps < 0:
            raise ValueError(f"critic_warmup_steps must be at least 0, got {self.critic_warmup_steps}")


class Ppo(ClippedPolicyGradient[PpoConfig]):
    """Clipped policy gradient with a critic's values as baseline."""

    kl_in_reward = True

    def __init__(self, config: PpoConfig):
        super().__init__(config)
        self.critic_warmup_steps = config.critic_warmup_steps
        self.critic = Critic(
            aggregation=config.aggregation, constant_length=config.constant_length, clip=config.value_clip
        )

    def with_values(self, batch: Batch, values: Float[Tensor, "T 1"]) -> Batch:
        """The batch with the values of the states before its tokens, and returns: advantage, not whitened, + value."""
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
        return replace(batch, values=before, returns=torch.where(batch.loss_mask, advantages + before, 0.0))

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] returns - values, whitened over the batch unless switched off."""
        assert batch.values is not None and batch.returns is not None
        advantages = torch.where(batch.loss_mask, batch.returns - batch.values, 0.0)
        return whiten(advantages, batch.loss_mask) if self.config.whiten_advantages else advantages


COMPONENT, CONFIG = Ppo, PpoConfig
