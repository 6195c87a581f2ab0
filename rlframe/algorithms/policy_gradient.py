"""The common part of policy-gradient algorithms: settings, token weights, the KL and entropy terms and their metrics.

An algorithm defines its advantages and its surrogate. The KL to the reference is in the loss or in the reward
(`kl_in_reward`), never in both. A rollout whose reward is NaN, because no reward function scored it, has advantage 0
and is part of no statistic of rewards, as in TRL; the KL and entropy terms of the loss still count its tokens.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.algorithms.correction import CorrectionConfig, cautions, correct, weight_mean
from rlframe.algorithms.credit import Credit, CreditConfig, turn_advantages
from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.algorithms.requirements import Requirements, RunFacts
from rlframe.ops.advantages import (
    NormalizeBy,
    attempt_sums,
    group_advantages,
    over_attempts,
    part_advantages,
    rewards_by_part,
    rewards_by_sequence,
)
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.choice import above_quantile
from rlframe.ops.kl import FOR_LOSSES, OF_K3, KlEstimator, kl_per_token, next_coefficient
from rlframe.ops.surrogate import clipped_surrogate, masked_mean
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import LossOutput, MeanIfAny, Metric, PolicyOutput, Sum
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

Coefficient = Annotated[float, Range(0, 1e4)]
"""Weight of a term of the loss, of the reward or of the advantages."""
GroupSize = Annotated[int, Range(1, 65_536)]
ClipLow = Annotated[float, Range(0, below=1)]
ClipHigh = Annotated[float, Range(0, 1e4)]


@dataclass(kw_only=True, slots=True)
class AdaptiveKlConfig:
    """Settings of the KL controller of Ziegler et al. 2019, arXiv 1909.08593, section 2.2, applied once a step."""

    target_nats: Annotated[float, Range(above=0, maximum=1e4)]
    """Mean KL of a token to the reference that the coefficient steers to, in nats, by the run's kl_estimator."""
    gain: Annotated[float, Range(above=0, maximum=1)] = 0.1
    """Relative change of the coefficient per relative error of the KL, which is limited to 0.2."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class PolicyGradientConfig:
    """Settings of every policy-gradient algorithm."""

    name: str
    """Name of the algorithm."""
    group_size: GroupSize = 8
    """Number of rollouts G per prompt."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Rule by which token losses become one number."""
    constant_length: Annotated[int, Range(0, 1 << 24)] | None = None
    """Length L of seq_mean_token_sum_norm, in tokens."""
    kl_coefficient: Coefficient = 0.0
    """Weight of the KL to the frozen reference, in the loss or in the reward. 0 needs no reference."""
    kl_in_reward: bool = False
    """Whether the KL of the policy that sampled is subtracted from the reward, summed over the rollout's tokens before
    the baseline; PPO and REINFORCE++ subtract it at each token (verl's use_kl_in_reward). Otherwise the KL is a term of
    the loss."""
    kl_estimator: KlEstimator = KlEstimator.K3
    """Estimator of the KL. k3 is GRPO's (arXiv 2402.03300, equation 4), but its gradient in the loss is not the KL's
    (arXiv 2512.21852). TRL 1.16's default is k3_weighted (use_bias_correction_kl)."""
    kl_cap: Annotated[float, Range(above=0, maximum=1e9)] | None = None
    """Upper bound of k3 of one token, in nats, in the loss and in the reward; verl and ms-swift use 10. null means no
    bound, as in Schulman's definition and in TRL; one token of a policy far from its reference can then dominate the
    gradient of a step. In the loss it does not bound the gradient of k3_plus, which is that of k2, as in verl."""
    adaptive_kl: AdaptiveKlConfig | None = None
    """Controller that keeps the KL near a target. kl_coefficient is its start."""
    entropy_coefficient: Annotated[float, Range(-1e4, 1e4)] = 0.0
    """Weight of the entropy bonus, which is aggregated like the loss, as in verl; TRL always uses its mean over tokens.
    A negative weight is a penalty."""
    top_entropy_fraction: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Fraction of the batch's tokens in the loss that have a surrogate: those at which the policy before the first
    update was least certain (0.2 in arXiv 2506.01939). Denominators and the KL and entropy terms still count all
    tokens. TRL's top_entropy_quantile uses the present policy over a micro-batch, and the entropy bonus of these tokens
    only. Below 1 a step has one more forward pass."""
    distillation_coefficient: Coefficient = 0.0
    """Weight of the teacher in the advantages: each token's advantage is lowered by this times (its logprob - the
    teacher's). 0 needs no teacher."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Correction of the difference between the engine that sampled and the trainer."""
    mask_truncated: bool = False
    """Whether attempts that reached a limit of tokens or turns are excluded from the loss and from its denominators,
    except the number of sequences. Their rewards still count in their group's baseline (DAPO's overlong filter)."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Dynamic sampling (DAPO): replaces groups whose rewards are all equal, until the batch is full. null keeps
    them."""
    reference_update: ReferenceUpdateConfig = field(default_factory=ReferenceUpdateConfig)
    """Rule by which the reference of the KL follows the policy."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.adaptive_kl and not self.kl_coefficient:
            raise SettingError("kl_coefficient", "must be above 0 with adaptive_kl, which starts from it", got="0")
        if self.kl_in_reward and self.kl_estimator in FOR_LOSSES:
            raise SettingError(
                "kl_estimator",
                f"has no effect in the reward, where {self.name} has the KL",
                got=self.kl_estimator,
                why="it would be k3",
                hint="use k3",
                stated=True,
            )
        if self.kl_cap is not None and self.kl_estimator not in OF_K3:
            raise SettingError(
                "kl_cap", f"has no effect with kl_estimator={self.kl_estimator}", got=self.kl_cap, hint="remove it"
            )
        if not self.kl_coefficient:
            refuse_changed(self, "kl_estimator", "kl_in_reward", "kl_cap", why="with kl_coefficient=0")
        if self.dynamic_sampling and self.group_size < 2:
            raise SettingError(
                "group_size",
                "must be at least 2 with dynamic_sampling",
                got=self.group_size,
                why="the rewards of a group of one are all equal",
            )
        normed = self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
        if normed and (self.constant_length is None or self.constant_length < 1):
            raise SettingError(
                "constant_length",
                f"must be at least 1 token with aggregation={self.aggregation}",
                got=self.constant_length,
            )
        if not normed and self.constant_length is not None:
            raise SettingError(
                "constant_length",
                f"has no effect with aggregation={self.aggregation}",
                got=self.constant_length,
                hint="remove it",
            )


def refuse_changed(config: Any, *names: str, why: str) -> None:
    """Refuses values other than the defaults for fields that would have no effect.

    Raises:
        ValueError: `name has no effect why, got value; remove it`.
    """
    defaults = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(config)
    }
    for name in names:
        if (value := getattr(config, name)) != defaults[name]:
            raise SettingError(name, f"has no effect {why}", got=value, hint="remove it")


@dataclass(kw_only=True)
class GroupNormalized:
    """Setting of algorithms whose advantages are rewards relative to their group. It has no slots, because it is
    combined with a base that has them."""

    normalize_by: NormalizeBy = NormalizeBy.GROUP_STD
    """Divisor of the rewards after subtraction of their group's mean."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    """Rule by which the turns of an attempt share what it has earned."""


def check_groups(config: PolicyGradientConfig, *, where: str = "") -> None:
    """Refuses settings that do not fit an algorithm whose baseline is the group.

    Args:
        where: the setting that makes the group the baseline, such as " with reward_coefficient=0.5".

    Raises:
        ValueError: groups of one, or a KL in a reward whose parts are normalised one by one.
    """
    if config.group_size < 2:
        raise SettingError(
            "group_size",
            f"must be at least 2 for {config.name}{where}",
            got=config.group_size,
            why="in a group of one every advantage is 0",
        )
    by = config.normalize_by if isinstance(config, GroupNormalized) else None
    if isinstance(config, GroupNormalized) and by is NormalizeBy.PART_STD and config.credit.by is not Credit.OUTCOME:
        raise SettingError(
            "normalize_by", f"must not be {by} with credit.by={config.credit.by}", why="turns have no parts of rewards"
        )
    if config.kl_in_reward and by is NormalizeBy.PART_STD:
        raise SettingError(
            "kl_in_reward", f"has no effect with normalize_by={by}: the KL is not one of the reward's parts", got="true"
        )


@dataclass(kw_only=True, slots=True)
class ClippedConfig(PolicyGradientConfig):
    """Settings of algorithms with PPO's clipped surrogate."""

    clip_low: ClipLow = 0.2
    """Lower bound of the probability ratio is 1 - clip_low."""
    clip_high: ClipHigh = 0.2
    """Upper bound of the probability ratio is 1 + clip_high."""
    dual_clip: Annotated[float, Range(above=1, maximum=1e9)] | None = None
    """Upper bound of the ratio for negative advantages: 3 in the paper (arXiv 1912.09729) and by default in verl
    (clip_ratio_c). null means no bound."""
    ratio_cap: Annotated[float, Range(above=1, maximum=1e9)] | None = None
    """Upper bound of the unclipped ratio: INTELLECT-2's two-sided clip (TRL's `delta`). Above 1 + clip_high it acts as
    dual_clip; below, it limits tokens with a positive advantage, while others are still limited at 1 + clip_high. null
    means no bound."""

    def __post_init__(self) -> None:
        # Called by name: dataclass(slots=True) creates a new class, which breaks zero-argument super().
        PolicyGradientConfig.__post_init__(self)
        if self.ratio_cap is not None and self.dual_clip is not None:
            raise SettingError("ratio_cap", "and dual_clip bound the same ratio", got=self.ratio_cap, hint="choose one")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise SettingError(
                "dual_clip", f"must be above 1 + clip_high={1 + self.clip_high}, or null for none", got=self.dual_clip
            )


Config = TypeVar("Config", bound=PolicyGradientConfig)
Clipping = TypeVar("Clipping", bound=ClippedConfig)


class PolicyGradient(OnlineAlgorithm, Generic[Config]):
    """A surrogate of the policy gradient, plus a KL and an entropy term."""

    bounds_ratio: ClassVar[bool] = True
    """Whether the surrogate bounds what a token far from the old policy does: a trust region."""

    def __init__(self, config: Config):
        self.config = config
        self.group_size = config.group_size
        self.needs_reference = config.kl_coefficient > 0
        self.needs_teacher_logprobs = config.distillation_coefficient > 0
        self.needs_entropies = config.top_entropy_fraction < 1
        self.bypass = config.correction.bypass
        self.needs_old_logprobs = not self.bypass
        self.mask_truncated = config.mask_truncated
        self.dynamic_sampling = config.dynamic_sampling
        self.reference_update = config.reference_update
        self.kl_coefficient = config.kl_coefficient
        """The present KL coefficient, which `adapt` may change."""

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] the weights by `aggregation`."""
        return token_weights(batch, self.config.aggregation, constant_length=self.config.constant_length)

    @property
    def requirements(self) -> Requirements:
        """Returns the algorithm's requirements."""
        return replace(super().requirements, teacher_coefficient=self.config.distillation_coefficient)

    def cross_faults(self, facts: RunFacts) -> Iterator[Fault]:
        """Yields the faults of corrections that need a policy before the update, of bounds of a ratio that is always 1,
        and of a reward part that is none."""
        if facts.one_update and self.config.correction.normalize_weights:
            yield Fault(
                "algorithm.correction.normalize_weights",
                f"must be false with {facts.one_update}",
                got="true",
                why="the mean weight needs the policy before the update, which is not computed separately",
                hint="use more minibatches or epochs",
            )
        without_effect = facts.one_update and not self.config.correction.bypass
        for each in fields(self.config) if without_effect else ():
            if each.name in ("dual_clip", "ratio_cap") and (bound := getattr(self.config, each.name)) != each.default:
                yield Fault(
                    f"algorithm.{each.name}",
                    f"has no effect with {facts.one_update}",
                    got=bound,
                    why="the ratio to the old policy is 1",
                    hint="remove it",
                )
        dynamic = self.config.dynamic_sampling
        if dynamic and dynamic.reward_part is not None and dynamic.reward_part not in facts.reward_names:
            yield Fault(
                "algorithm.dynamic_sampling.reward_part",
                f"must be one of reward.parts, {', '.join(facts.reward_names)}",
                got=repr(dynamic.reward_part),
                hint=did_you_mean(dynamic.reward_part, facts.reward_names),
            )

    def cautions(self, facts: RunFacts) -> Iterator[str]:
        """Yields those of its correction, and that the gradient of the KL's estimator is only noise in the loss."""
        config = self.config
        yield from cautions(config.correction, facts, name=config.name, bounds_ratio=self.bounds_ratio)
        if config.kl_coefficient and not config.kl_in_reward and config.kl_estimator is KlEstimator.K1:
            yield (
                "the expected gradient of algorithm.kl_estimator=k1 in the loss is 0 for tokens of the present policy, "
                "so that the term only adds noise and bounds no KL; set algorithm.kl_estimator=k2 or k3_plus, or "
                "algorithm.kl_in_reward=true"
            )

    def train_batch(self, batch: Batch) -> TrainBatch:
        """Returns the batch with its advantages: those of scored rollouts relative to each other, 0 for the others. The
        teacher's part is added last, so that no whitening rescales it.

        A_t <- A_t - distillation_coefficient * (log pi_S - log pi_T), detached, is the reverse KL to the teacher at the
        sampled tokens (slime `loss.py`, its on-policy distillation). With `correction.normalize_weights` advantages are
        divided by the mean weight, which is the same as dividing the weights: every surrogate is linear in scale.
        """
        train_batch = batch.with_advantages(self.scored_advantages(batch))
        if batch.teacher_logprobs is not None:
            gap = torch.where(batch.loss_mask, sampled_logprobs(batch) - batch.teacher_logprobs, 0.0)
            train_batch.advantages = train_batch.advantages - self.config.distillation_coefficient * gap
        train_batch = self.marked(train_batch)
        if self.config.correction.normalize_weights:
            assert batch.old_logprobs is not None, "refused by config.check"
            log_ratio = batch.old_logprobs - batch.rollout_logprobs
            train_batch.advantages = train_batch.advantages / weight_mean(self.config.correction, log_ratio, batch)
        return train_batch

    def marked(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with a mark on the tokens that the algorithm treats differently. Its advantages are not yet
        divided by a mean weight."""
        return batch

    def with_entropies(self, batch: Sequences, entropies: Float[Tensor, " T"]) -> Sequences:
        """Returns the batch with a mark on the tokens of the `top_entropy_fraction`."""
        assert isinstance(batch, TrainBatch)
        return replace(batch, uncertain=above_quantile(entropies, batch.loss_mask, self.config.top_entropy_fraction))

    def scored_advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] `advantages` of the rollouts with a reward, computed as if they were the whole batch. 0.0 for the
        others."""
        scored = ~batch.rewards.isnan()
        if bool(scored.all()):
            return self.advantages(batch)
        if not bool(scored.any()):
            return torch.zeros(batch.num_tokens)
        on_scored = torch.repeat_interleave(scored, batch.lengths)
        part = batch.select(scored.nonzero()[:, 0].tolist())
        of_part = part.with_advantages(self.advantages(part)).advantages
        return torch.zeros(batch.num_tokens).masked_scatter_(on_scored, of_part)

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] GRPO's advantages, unless overridden: the rollout's group advantage on each of its sampled
        tokens, or with `credit` that of each turn, or both (arXiv 2505.10978, equation 8)."""
        assert isinstance(self.config, GroupNormalized)
        credit = self.config.credit
        if credit.by is Credit.OUTCOME:
            return self.outcome_advantages(batch)
        by_turn = turn_advantages(batch, self.kl_penalty(batch), credit, by=self.config.normalize_by)
        return by_turn if credit.by is Credit.TURN else self.outcome_advantages(batch) + credit.weight * by_turn

    def outcome_advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] the rollout's group advantage on each of its sampled tokens."""
        assert isinstance(self.config, GroupNormalized)
        if self.config.normalize_by is NormalizeBy.PART_STD:
            parts, weights = rewards_by_part(batch)
            return on_tokens(over_attempts(part_advantages, parts, weights, batch=batch), batch)
        compute = partial(group_advantages, by=self.config.normalize_by)
        return on_tokens(over_attempts(compute, self.net_rewards(batch), batch=batch), batch)

    def net_rewards(self, batch: Batch) -> Float[Tensor, " R"]:
        """Returns [R] the reward of each rollout's attempt, with `kl_in_reward` minus the KL penalty of its tokens."""
        return rewards_by_sequence(batch) - attempt_sums(self.kl_penalty(batch), batch)

    @abstractmethod
    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] the loss whose gradient is the policy gradient, and the algorithm's own metrics."""

    def loss(self, policy: PolicyOutput, batch: TrainBatch, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns sum weights * (correction * surrogate + kl_coefficient * KL - entropy_coefficient * entropy).

        In a step of one update the old policy is the policy itself, without gradient. With `bypass` masks and metrics
        compare that policy with the engine; after several updates the difference includes the updates.
        """
        config, mask, present = self.config, batch.loss_mask, policy.logprobs.detach()
        trainer_logprobs = present if self.bypass or batch.old_logprobs is None else batch.old_logprobs
        old_logprobs = batch.rollout_logprobs if self.bypass else trainer_logprobs
        correction = correct(config.correction, batch, trainer_logprobs=trainer_logprobs, present_logprobs=present)
        # A token that a mask drops is in no ratio of a whole rollout either.
        token_loss, metrics = self.surrogate(
            policy.logprobs, old_logprobs, replace(batch, loss_mask=mask & correction.kept)
        )
        if correction.factor is not None:
            token_loss = token_loss * correction.factor
        if batch.uncertain is not None:
            token_loss = token_loss * batch.uncertain
        metrics |= correction.metrics | {"train/entropy_nats": masked_mean(policy.entropy, mask)}
        if batch.reference_logprobs is not None:
            kl = kl_per_token(
                policy.logprobs,
                batch.reference_logprobs,
                config.kl_estimator,
                old_logprobs=old_logprobs,
                cap=config.kl_cap,
            )
            if not config.kl_in_reward:
                token_loss = token_loss + self.kl_coefficient * kl
            metrics["train/kl_nats"] = masked_mean(kl, mask, MeanIfAny)
        if batch.teacher_logprobs is not None:
            # Its mean over samples is the reverse KL.
            metrics["train/teacher_kl_nats"] = masked_mean(policy.logprobs - batch.teacher_logprobs, mask)
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * policy.entropy
        loss = (weights * token_loss).sum()
        metrics["train/loss"] = Sum(loss.detach())
        return LossOutput(loss=loss, metrics=metrics)

    def kl_penalty(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] nats subtracted from the reward: kl_coefficient * KL of the policy that sampled to the reference.
        0.0 where loss_mask is False, and everywhere if the KL is not in the reward."""
        config = self.config
        if not (self.needs_reference and config.kl_in_reward):
            return torch.zeros(batch.num_tokens)
        assert batch.reference_logprobs is not None
        kl = kl_per_token(sampled_logprobs(batch), batch.reference_logprobs, config.kl_estimator, cap=config.kl_cap)
        return torch.where(batch.loss_mask, self.kl_coefficient * kl, 0.0)

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Moves the KL coefficient, if it is adaptive and the step had a token in the loss. Returns the one that the
        step was trained with."""
        used, adaptive = self.kl_coefficient, self.config.adaptive_kl
        if adaptive and "train/kl_nats" in metrics:
            self.kl_coefficient = next_coefficient(
                used, metrics["train/kl_nats"], target=adaptive.target_nats, gain=adaptive.gain
            )
        return {"train/kl_coefficient": used} if self.needs_reference else {}

    def state(self) -> dict[str, float]:
        """Returns the KL coefficient."""
        return {"kl_coefficient": self.kl_coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores the KL coefficient of the next step."""
        self.kl_coefficient = state["kl_coefficient"]


class ClippedPolicyGradient(PolicyGradient[Clipping]):
    """A policy gradient with PPO's clipped surrogate of the token's ratio."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] the surrogate of `clipped_surrogate`."""
        config = self.config
        token_loss, clipped = clipped_surrogate(
            logprobs,
            old_logprobs,
            batch.advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            ratio_cap=config.ratio_cap,
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


def sampled_logprobs(batch: Batch) -> Float[Tensor, " T"]:
    """Returns [T] nats under the policy that sampled: `old_logprobs`, or the engine's in a step of one update, which
    has no `old_logprobs` (verl and TRL use the trainer's there too, with one more forward pass)."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def on_tokens(per_rollout: Float[Tensor, " R"], batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] each rollout's value on its sampled tokens, 0.0 on the others."""
    return torch.repeat_interleave(per_rollout, batch.lengths) * batch.loss_mask
