"""What policy-gradient algorithms share: settings, token weights, the KL and entropy terms and their metrics.

An algorithm says what its advantages and its surrogate are. The KL to the reference is in the loss or in the reward,
by algorithm and never in both.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.algorithms.correction import CorrectionConfig, correct
from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.ops.advantages import group_advantages
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.kl import FOR_LOSSES, KlEstimator, kl_per_token, next_coefficient
from rlframe.ops.surrogate import clipped_surrogate, masked_mean
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import LossOutput, Metric, PolicyOutput, Sum


@dataclass(kw_only=True, slots=True)
class AdaptiveKlConfig:
    """The controller of Ziegler et al. 2019, arXiv 1909.08593, section 2.2, once a step."""

    target_nats: float
    """Mean KL of a token to the reference that the coefficient is moved towards, by the run's kl_estimator."""
    gain: float = 0.1
    """What a relative error of the KL, at most 0.2, changes the coefficient by, relatively."""

    def __post_init__(self) -> None:
        if self.target_nats <= 0:
            raise ValueError(f"target_nats must be above 0, got {self.target_nats}")
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain must lie in (0, 1], got {self.gain}")


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig:
    """Settings that every policy-gradient algorithm has."""

    name: str
    """The algorithm."""
    group_size: int = 8
    """G, rollouts per prompt."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""
    constant_length: int | None = None
    """L of seq_mean_token_sum_norm, in tokens."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the frozen reference in the loss; 0 needs no reference."""
    kl_estimator: KlEstimator = KlEstimator.K3
    """Which estimate of the KL."""
    adaptive_kl: AdaptiveKlConfig | None = None
    """Move the coefficient so that the KL stays near a target; kl_coefficient is where it begins."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    distillation_coefficient: float = 0.0
    """Weight of the teacher in the advantages: each token's loses this times (its logprob - the teacher's). 0 needs no
    teacher."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Between the engine that sampled and the trainer."""
    mask_truncated: bool = False
    """Rollouts that ran out of tokens stay out of the loss and of its denominators, other than the number of
    sequences; their rewards still count in their group's baseline (DAPO's overlong filter)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace groups whose rewards are all equal, until the batch is full (DAPO); null keeps them."""
    reference_update: ReferenceUpdateConfig = field(default_factory=ReferenceUpdateConfig)
    """Let the reference of the KL follow the policy."""

    def __post_init__(self) -> None:
        for name in ("kl_coefficient", "distillation_coefficient"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.adaptive_kl and not self.kl_coefficient:
            raise ValueError("kl_coefficient must be above 0 with adaptive_kl, which begins there, got 0")
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2 with dynamic_sampling, got {self.group_size}: the rewards of a group "
                "of one are all equal"
            )
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

    def needs_groups(self) -> None:
        """Refuses groups of one, for an algorithm whose baseline is the group."""
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2 for {self.name}, got {self.group_size}: in a group of one every "
                "advantage is 0"
            )

    def kl_is_in_the_reward(self) -> None:
        """Refuses estimators whose gradient is their point, for an algorithm that takes the KL off the reward."""
        if self.kl_estimator in FOR_LOSSES:
            raise ValueError(
                f"kl_estimator={self.kl_estimator} has no effect in the reward, where {self.name} has the KL: it would "
                "be k3; use k3"
            )


@dataclass(kw_only=True, slots=True)
class ClippedConfig(PolicyGradientConfig):
    """Settings of algorithms with PPO's clipped surrogate."""

    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - this."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + this."""
    dual_clip: float | None = None
    """Where the advantage is below 0, the ratio counts as this at most: 3 in the paper (arXiv 1912.09729); null: no
    limit. INTELLECT-2's two-sided clip (`delta` elsewhere) is the same."""

    def __post_init__(self) -> None:
        # By name: a dataclass with slots is a class made anew, which super() does not know.
        PolicyGradientConfig.__post_init__(self)
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must lie in [0, 1), got {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip must be above 1 + clip_high={1 + self.clip_high}, or null for none, got {self.dual_clip}"
            )


Config = TypeVar("Config", bound=PolicyGradientConfig)
Clipping = TypeVar("Clipping", bound=ClippedConfig)


class PolicyGradient(OnlineAlgorithm, Generic[Config]):
    """A surrogate of the policy gradient, plus a KL and an entropy term."""

    kl_in_reward: ClassVar[bool] = False
    """True when `advantages` takes the KL off the reward; the loss then has no KL term."""

    def __init__(self, config: Config):
        self.config = config
        self.group_size = config.group_size
        self.needs_reference = config.kl_coefficient > 0
        self.needs_teacher_logprobs = config.distillation_coefficient > 0
        self.bypass = config.correction.bypass
        self.mask_truncated = config.mask_truncated
        self.dynamic_sampling = config.dynamic_sampling
        self.reference_update = config.reference_update
        self.kl_coefficient = config.kl_coefficient
        """The present one, which `adapt` may move."""

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """[T] by `aggregation`."""
        return token_weights(batch, self.config.aggregation, constant_length=self.config.constant_length)

    def train_batch(self, batch: Batch) -> TrainBatch:
        """With the reverse KL to the teacher at the sampled tokens taken off the advantages, where there is one.

        A_t <- A_t - distillation_coefficient * (log pi_S - log pi_T), detached. Source: slime `loss.py`, its
        on-policy distillation; the last thing that is done, so that no whitening rescales it.
        """
        train_batch = super().train_batch(batch)
        if batch.teacher_logprobs is not None:
            gap = torch.where(batch.loss_mask, sampled_logprobs(batch) - batch.teacher_logprobs, 0.0)
            train_batch.advantages = train_batch.advantages - self.config.distillation_coefficient * gap
        return train_batch

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] the rollout's normalised group advantage on each of its sampled tokens: GRPO's, unless overridden."""
        return on_tokens(group_advantages(batch.rewards, batch.group, normalize=True), batch)

    @abstractmethod
    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """[T] the loss whose gradient is the policy gradient, and the algorithm's own metrics."""

    def loss(self, policy: PolicyOutput, batch: TrainBatch, weights: Float[Tensor, " T"]) -> LossOutput:
        """sum weights * (correction * surrogate + kl_coefficient * KL - entropy_coefficient * entropy).

        In a step of one update the policy before it is the policy itself, without gradient. With `bypass` that is
        what the metrics compare with the engine; after several updates they then show these too.
        """
        config, mask = self.config, batch.loss_mask
        trainer_logprobs = policy.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        old_logprobs = batch.rollout_logprobs if self.bypass else trainer_logprobs
        token_loss, metrics = self.surrogate(policy.logprobs, old_logprobs, batch)
        correction, more = correct(config.correction, trainer_logprobs, batch.rollout_logprobs, batch)
        if correction is not None:
            token_loss = token_loss * correction
        metrics |= more | {"train/entropy_nats": masked_mean(policy.entropy, mask)}
        if batch.reference_logprobs is not None:
            kl = kl_per_token(policy.logprobs, batch.reference_logprobs, config.kl_estimator, old_logprobs=old_logprobs)
            if not self.kl_in_reward:
                token_loss = token_loss + self.kl_coefficient * kl
            metrics["train/kl_nats"] = masked_mean(kl, mask)
        if batch.teacher_logprobs is not None:
            # Its mean over samples is the reverse KL.
            metrics["train/teacher_kl_nats"] = masked_mean(policy.logprobs - batch.teacher_logprobs, mask)
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * policy.entropy
        loss = (weights * token_loss).sum()
        metrics["train/loss"] = Sum(float(loss.detach()))
        return LossOutput(loss=loss, metrics=metrics)

    def kl_penalty(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] nats: kl_coefficient * KL of the policy that sampled to the reference; 0.0 where loss_mask is False."""
        if not self.needs_reference:
            return torch.zeros(batch.num_tokens)
        assert batch.reference_logprobs is not None
        kl = kl_per_token(sampled_logprobs(batch), batch.reference_logprobs, self.config.kl_estimator)
        return torch.where(batch.loss_mask, self.kl_coefficient * kl, 0.0)

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Moves the KL coefficient, if it is to be; gives the one that the step was trained with."""
        used, adaptive = self.kl_coefficient, self.config.adaptive_kl
        if adaptive:
            self.kl_coefficient = next_coefficient(
                used, metrics["train/kl_nats"], target=adaptive.target_nats, gain=adaptive.gain
            )
        return {"train/kl_coefficient": used} if self.needs_reference else {}

    def state(self) -> dict[str, float]:
        """The KL coefficient."""
        return {"kl_coefficient": self.kl_coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Goes on with the KL coefficient that the next step was to have."""
        self.kl_coefficient = state["kl_coefficient"]


class ClippedPolicyGradient(PolicyGradient[Clipping]):
    """With PPO's clipped surrogate of the token's ratio."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """[T] see `clipped_surrogate`."""
        config = self.config
        token_loss, clipped = clipped_surrogate(
            logprobs,
            old_logprobs,
            batch.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


def sampled_logprobs(batch: Batch) -> Float[Tensor, " T"]:
    """[T] nats under the policy that sampled: `old_logprobs`, or the engine's in a step of one update, which has no
    others."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def on_tokens(per_rollout: Float[Tensor, " R"], batch: Sequences) -> Float[Tensor, " T"]:
    """[T] each rollout's value on its sampled tokens, 0.0 on the others."""
    return torch.repeat_interleave(per_rollout, batch.lengths) * batch.loss_mask
