"""Group relative policy optimization.

Source: Shao et al. 2024, arXiv 2402.03300, equation 3, with: separate clip bounds (DAPO, arXiv 2503.14476), group
normalisation optional (Dr.GRPO, arXiv 2503.20783), and the aggregation named in the config. The paper's own form is
`aggregation: seq_mean_token_mean`, `kl_coefficient: 0.04`, `kl_estimator: k3`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.ops.advantages import group_advantages
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.kl import KlEstimator, kl_per_token
from rlframe.ops.surrogate import clipped_surrogate, logprob_gap, masked_mean
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import LossOutput, Metric, PolicyOutput, Sum


@dataclass(kw_only=True, slots=True)
class GrpoConfig:
    """GRPO's settings."""

    name: str = "grpo"
    """The algorithm."""
    group_size: int = 8
    """G, rollouts per prompt."""
    normalize_by_std: bool = True
    """Divide centred rewards by their group's standard deviation."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - this."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + this."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""
    constant_length: int | None = None
    """L of seq_mean_token_sum_norm, in tokens."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the frozen reference in the loss; 0 needs no reference."""
    kl_estimator: KlEstimator = KlEstimator.K3
    """Which estimate of the KL."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2 for grpo, got {self.group_size}: in a group of one every advantage is 0"
            )
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must lie in [0, 1), got {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}")
        if self.kl_coefficient < 0:
            raise ValueError(f"kl_coefficient must be at least 0, got {self.kl_coefficient}")
        normed = self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
        if normed and (self.constant_length is None or self.constant_length < 1):
            raise ValueError(
                f"constant_length must be at least 1 token with aggregation={self.aggregation}, "
                f"got {self.constant_length}"
            )
        if not normed and self.constant_length is not None:
            raise ValueError(
                f"constant_length has no effect with aggregation={self.aggregation}, got {self.constant_length}; "
                "remove it"
            )


class Grpo(OnlineAlgorithm):
    """Clipped policy gradient with the group's mean reward as baseline."""

    def __init__(self, config: GrpoConfig):
        self.config = config
        self.group_size = config.group_size
        self.needs_reference = config.kl_coefficient > 0

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """[T] by `aggregation`."""
        return token_weights(batch, self.config.aggregation, constant_length=self.config.constant_length)

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] the rollout's group advantage on each of its sampled tokens."""
        per_rollout = group_advantages(batch.rewards, batch.group, normalize=self.config.normalize_by_std)
        return torch.repeat_interleave(per_rollout, batch.lengths) * batch.loss_mask

    def loss(self, policy: PolicyOutput, batch: TrainBatch, weights: Float[Tensor, " T"]) -> LossOutput:
        """sum weights * (clipped surrogate + kl_coefficient * KL - entropy_coefficient * entropy)."""
        config, mask = self.config, batch.loss_mask
        old_logprobs = policy.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        token_loss, clipped = clipped_surrogate(
            policy.logprobs, old_logprobs, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
        )
        metrics: dict[str, Metric] = {
            "train/clip_fraction": masked_mean(clipped.float(), mask),
            "train/entropy_nats": masked_mean(policy.entropy, mask),
            **logprob_gap(old_logprobs, batch.rollout_logprobs, mask),
        }
        if batch.reference_logprobs is not None:
            kl = kl_per_token(policy.logprobs, batch.reference_logprobs, config.kl_estimator)
            token_loss = token_loss + config.kl_coefficient * kl
            metrics["train/kl_nats"] = masked_mean(kl, mask)
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * policy.entropy
        loss = (weights * token_loss).sum()
        metrics["train/loss"] = Sum(float(loss.detach()))
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Grpo, GrpoConfig
