"""Policy-gradient surrogates and what is watched about them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlframe.ops.kl import MAX_LOG_RATIO
from rlframe.types.results import Mean, Metric, Peak


def clipped_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """[T] max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old logprob), and where it clipped.

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: Yu et al. 2025, arXiv 2503.14476,
    equation 10. The log-ratio is clamped to +-20 as in verl.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(plain, clipped), clipped > plain


def masked_mean(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Mean:
    """The mean over True tokens, as a sum and a count that add up over any split."""
    return Mean(float(values.detach()[mask].sum()), float(mask.sum()))


def logprob_gap(
    old_logprobs: Float[Tensor, " T"], rollout_logprobs: Float[Tensor, " T"], mask: Bool[Tensor, " T"]
) -> dict[str, Metric]:
    """How far the trainer's logprobs are from the engine's on the same tokens and, hopefully, the same weights."""
    gap = (old_logprobs.detach() - rollout_logprobs)[mask].abs()
    return {
        "rollout/logprob_gap_mean_nats": Mean(float(gap.sum()), float(gap.numel())),
        "rollout/logprob_gap_max_nats": Peak(float(gap.max()) if gap.numel() else 0.0),
    }
