"""Correction of the difference between engine and trainer, for every policy-gradient algorithm.

Known methods are settings of it. Token TIS is `weight: token` with `weight_cap: 2`. Decoupled PPO (arXiv 2505.24298) is
the same without a cap, if a batch serves several updates. IcePop adds a mask `{of: token, low: 0.5, high: 5}` to the
weight. Sequence TIS by product is `weight: seq_prod`. Masked importance sampling is a mask of `seq_geo` with bounds
close to 1; verl's seq_max_k3 is a mask of that name. `bypass` uses the engine's logprobs as those of the old policy:
with a mask of `seq_geo` it is verl's `bypass_ppo_clip_geo_rs`.

verl also removes rejected tokens from the denominators, TRL does not. verl's default is decoupled without a weight; TRL
1.16's is `weight: seq_prod` with a mask `{of: seq_prod, high: 3}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlframe.algorithms.requirements import RunFacts
from rlframe.ops.correction import (
    RATIOS,
    MaskOf,
    RatioOf,
    engine_gap,
    engine_ratio,
    spread,
    statistic,
    strayed,
    within,
)
from rlframe.ops.sequences import sequence_sums
from rlframe.types.batch import Sequences, TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class MaskConfig:
    """Mask that drops tokens, or whole sequences, whose statistic is outside bounds."""

    of: MaskOf
    """Statistic that is compared with the bounds."""
    low: Annotated[float, Range(0, 1e9)] | None = None
    """Smallest ratio that is kept. null means no lower bound."""
    high: Annotated[float, Range(0, 1e9)] | None = None
    """Greatest ratio, or distance in nats, that is kept. null means no upper bound."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.of not in RATIOS and self.low is not None:
            raise SettingError(
                "low", f"has no effect with of={self.of}, which is a distance", got=self.low, hint="remove it"
            )
        if self.low is None and self.high is None:
            bounds = "low or high, such as 0.5 and 5" if self.of in RATIOS else "high, in nats"
            raise SettingError("of", f"needs {bounds}, got none", got=self.of, stated=True)
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise SettingError("low", f"must be below high={self.high}", got=self.low)


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Correction of a token's surrogate by the ratio w of its probability under the trainer to that under the
    engine."""

    weight: RatioOf = RatioOf.NONE
    """Factor of the surrogate: none, w of the token, or w of its sequence by product or geometric mean."""
    weight_cap: Annotated[float, Range(above=0, maximum=1e9)] | None = None
    """Upper bound of w. null means no bound."""
    weight_floor: Annotated[float, Range(0, 1e9)] | None = None
    """Lower bound of w. null means no bound. It raises small weights too (TRL's clip_min, OpenRLHF's 0.5)."""
    normalize_weights: bool = False
    """Whether to divide the weights, with masked ones as 0, by their mean over the tokens of the rollout batch; with a
    weight of sequences, over its sequences (verl's rollout_is_batch_normalize)."""
    masks: list[MaskConfig] = field(default_factory=list)
    """Masks of tokens. A token that any mask rejects has surrogate 0. The denominators of the aggregation still count
    it, so that the other tokens do not weigh more."""
    stray_limit_nats: Annotated[float, Range(-1e3, 1e3)] | None = None
    """Greatest amount, in nats and in the mean over tokens, by which the present policy may find a sequence less likely
    than the engine did. Tokens with a negative advantage in other sequences are dropped (DeepSeek-V3.2's off-policy
    sequence mask). null keeps them."""
    bypass: bool = False
    """Whether the engine's logprobs serve as those of the old policy. The clipped ratio is then relative to the engine,
    and the forward pass for old logprobs is saved. Masks then compare the present policy with the engine."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("weight_cap", "weight_floor", "normalize_weights"):
            value = getattr(self, name)
            if self.weight is RatioOf.NONE and value not in (None, False):
                raise SettingError(name, "has no effect with weight=none", got=value, hint="choose a weight")
        if self.weight_cap is not None and self.weight_floor is not None and self.weight_floor >= self.weight_cap:
            raise SettingError("weight_floor", f"must be below weight_cap={self.weight_cap}", got=self.weight_floor)
        statistics = [mask.of for mask in self.masks]
        if len(statistics) > len(set(statistics)):
            raise SettingError(
                "masks",
                "must have one entry for a statistic",
                got=", ".join(statistics),
                hint="join their bounds in one entry",
            )
        if self.bypass and self.weight is not RatioOf.NONE:
            raise SettingError(
                "weight",
                "must be none with bypass, whose clipped ratio is the ratio to the engine already",
                got=self.weight,
                hint="a weight without that clip is algorithm.name=cispo with bypass",
            )


def cautions(config: CorrectionConfig, facts: RunFacts, *, name: str, bounds_ratio: bool) -> Iterator[str]:
    """Yields that nothing bounds what a token of an older policy does to the present one, or one of an engine with
    other probabilities.

    Args:
        name: the algorithm's.
        bounds_ratio: whether its surrogate bounds what a token far from the old policy does.
    """
    if facts.max_policy_lag and (reason := unbounded(config, facts, name=name, bounds_ratio=bounds_ratio)):
        yield (
            f"loop.max_policy_lag={facts.max_policy_lag} trains on tokens of older policies, and {reason}, so "
            "that training may become unstable; set algorithm.correction.bypass=true (a clip against the engine's "
            "logprobs), or algorithm.correction.weight=token with algorithm.correction.weight_cap=2, or "
            "algorithm.correction.masks"
        )
    weighs = config.weight is not RatioOf.NONE or config.masks or config.stray_limit_nats is not None
    if facts.engine_rounds and not (weighs or config.bypass):
        yield (
            f"with {facts.engine_rounds} engines sample by probabilities further from the trainer's than rounding "
            "in bfloat16 makes them (rollout/logprob_gap_mean_nats), and nothing corrects for that; set "
            "algorithm.correction.weight=token with algorithm.correction.weight_cap=2, or "
            "algorithm.correction.masks"
        )


def unbounded(config: CorrectionConfig, facts: RunFacts, *, name: str, bounds_ratio: bool) -> str | None:
    """Returns why the loss has no trust region for tokens of older policies; None if it has one.

    A mask, a weight with a cap, or a bounded surrogate whose old policy is not always the present one, is taken for a
    trust region.
    """
    if config.masks or config.stray_limit_nats is not None or config.weight_cap is not None:
        return None
    if not bounds_ratio and (config.bypass or not facts.one_update):
        return f"algorithm.name={name} does not bound their ratio to the old policy"
    if config.bypass or not facts.one_update:
        return None
    if config.weight is not RatioOf.NONE:
        key = f"algorithm.correction.weight={config.weight}"
        return f"{key} without a weight_cap lets one of them weigh any amount"
    return f"with {facts.one_update} their ratio to the old policy is 1, so that nothing corrects for their age"


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Effect of a correction on the surrogate."""

    factor: Float[Tensor, " T"] | None
    """[T] factor of each token's surrogate. None means 1.0 everywhere."""
    kept: Bool[Tensor, " T"]
    """[T] False if a mask dropped the token."""
    metrics: dict[str, Metric]
    """Metrics of the gap between engine and trainer. Without a weight, `rollout/effective_fraction` is the fraction
    that token ratios would leave if they were the weight."""


def correct(
    config: CorrectionConfig,
    batch: TrainBatch,
    *,
    trainer_logprobs: Float[Tensor, " T"],
    present_logprobs: Float[Tensor, " T"],
) -> Correction:
    """Returns the correction of the tokens of `batch`. Weights are not normalised yet, see `weight_mean`.

    Args:
        trainer_logprobs: logprobs of the policy before the update, or before this optimizer step; without gradient.
        present_logprobs: logprobs of the policy before this optimizer step; without gradient.
    """
    log_ratio = trainer_logprobs - batch.rollout_logprobs
    weights, kept = weights_and_masks(config, log_ratio, batch)
    if config.stray_limit_nats is not None:
        present = present_logprobs - batch.rollout_logprobs
        kept = kept & ~strayed(present, batch.advantages, batch, limit_nats=config.stray_limit_nats)
    metrics = engine_gap(log_ratio, batch.loss_mask) | spread(weights, kept, batch.loss_mask)
    factor = kept.to(weights.dtype)
    if config.weight is not RatioOf.NONE:
        factor = weights * kept
    elif not config.masks and config.stray_limit_nats is None:
        factor = None
    return Correction(factor=factor, kept=kept, metrics=metrics)


def weights_and_masks(
    config: CorrectionConfig, log_ratio: Float[Tensor, " T"], batch: Sequences
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Returns [T] the weights within their bounds, and [T] True for tokens that the masks keep.

    Args:
        log_ratio: nats, trainer - engine.
    """
    weights = engine_ratio(log_ratio, RatioOf.TOKEN if config.weight is RatioOf.NONE else config.weight, batch)
    if config.weight_cap is not None or config.weight_floor is not None:
        weights = weights.clamp(min=config.weight_floor, max=config.weight_cap)
    kept = torch.ones_like(batch.loss_mask)
    for mask in config.masks:
        kept &= within(statistic(log_ratio, mask.of, batch), mask.low, mask.high)
    return weights, kept


def weight_mean(config: CorrectionConfig, log_ratio: Float[Tensor, " T"], batch: Sequences) -> float:
    """Returns the mean weight of the batch's tokens in the loss, or of its sequences that have any. Masked weights are
    0.

    Returns 1.0 if the mean is 0. Source: verl `rollout_corr_helper.py`, rollout_is_batch_normalize.
    """
    weights, kept = weights_and_masks(config, log_ratio, batch)
    weights = weights * kept
    if config.weight is RatioOf.TOKEN:
        inside = weights[batch.loss_mask]
    else:
        counts = sequence_sums(torch.ones_like(weights), batch)
        inside = (sequence_sums(weights, batch) / counts)[counts > 0]
    return float(inside.mean()) or 1.0 if inside.numel() else 1.0
