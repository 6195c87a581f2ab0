"""The correction between engine and trainer, for every policy-gradient algorithm.

Its parts are what others name: token TIS is `weight: token` with `weight_cap: 2`; decoupled PPO (arXiv 2505.24298) the
same without a cap, where a batch is good for several updates; IcePop adds `mask: token` with `mask_low: 0.5` and
`mask_high: 5` to the weight; sequence TIS by product is `weight: seq_prod`; masked importance sampling is
`mask: seq_geo` with bounds close to 1. `bypass` takes the engine's logprobs for those of the old policy instead.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlframe.ops.correction import RatioOf, engine_gap, engine_ratio, spread, within
from rlframe.types.batch import Sequences
from rlframe.types.results import Metric


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """What the ratio w = probability under the trainer / under the engine does to the surrogate of a token."""

    weight: RatioOf = RatioOf.NONE
    """Multiply the surrogate by w of the token, or of its sequence by product or geometric mean."""
    weight_cap: float | None = None
    """w counts as this at most; null: no limit."""
    mask: RatioOf = RatioOf.NONE
    """Leave tokens, or whole sequences, out whose w is not within mask_low and mask_high. Their surrogate is 0; the
    denominators of the aggregation still count them, so that the others do not weigh more."""
    mask_low: float | None = None
    """Smallest w that is kept; null: any."""
    mask_high: float | None = None
    """Greatest w that is kept; null: any."""
    bypass: bool = False
    """The engine's logprobs serve as those of the old policy: the ratio that is clipped is to the engine, and the
    forward pass that computes old logprobs is saved."""

    def __post_init__(self) -> None:
        if self.weight is RatioOf.NONE and self.weight_cap is not None:
            raise ValueError(f"weight_cap has no effect with weight=none, got {self.weight_cap}; choose a weight")
        if self.weight_cap is not None and self.weight_cap <= 0:
            raise ValueError(f"weight_cap must be above 0, got {self.weight_cap}")
        self._check_mask()
        if self.bypass and (self.weight, self.mask) != (RatioOf.NONE, RatioOf.NONE):
            raise ValueError(
                f"bypass makes the old policy the engine's, so that weight={self.weight} and mask={self.mask} would "
                "compare it with itself; use one or the other"
            )

    def _check_mask(self) -> None:
        for name in ("mask_low", "mask_high"):
            bound = getattr(self, name)
            if bound is not None and self.mask is RatioOf.NONE:
                raise ValueError(f"{name} has no effect with mask=none, got {bound}; choose a mask")
            if bound is not None and bound < 0:
                raise ValueError(f"{name} must be at least 0, got {bound}")
        if self.mask is not RatioOf.NONE and self.mask_low is None and self.mask_high is None:
            raise ValueError(f"mask={self.mask} needs mask_low or mask_high, such as 0.5 and 5, got neither")
        if self.mask_low is not None and self.mask_high is not None and self.mask_low >= self.mask_high:
            raise ValueError(f"mask_low must be below mask_high={self.mask_high}, got {self.mask_low}")


def correct(
    config: CorrectionConfig,
    logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    batch: Sequences,
) -> tuple[Float[Tensor, " T"] | None, dict[str, Metric]]:
    """[T] what each token's surrogate is multiplied by, None for 1.0 everywhere; and metrics of the gap, in any case.

    Without a weight, `rollout/effective_fraction` is what token ratios would leave, were they the weight.

    Args:
        logprobs: the trainer's, of the policy before the update, or before this optimizer step; without gradient.
    """
    log_ratio = logprobs - rollout_logprobs
    weights = engine_ratio(log_ratio, RatioOf.TOKEN if config.weight is RatioOf.NONE else config.weight, batch)
    if config.weight_cap is not None:
        weights = weights.clamp(max=config.weight_cap)
    kept = within(engine_ratio(log_ratio, config.mask, batch), config.mask_low, config.mask_high)
    metrics = engine_gap(log_ratio, batch.loss_mask) | spread(weights, kept, batch.loss_mask)
    if config.weight is RatioOf.NONE and config.mask is RatioOf.NONE:
        return None, metrics
    return (kept.to(weights.dtype) if config.weight is RatioOf.NONE else weights * kept), metrics
