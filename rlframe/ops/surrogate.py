"""Policy-gradient surrogates and what is watched about them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlframe.ops.kl import MAX_LOG_RATIO
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean


def clipped_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """[T] max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old logprob), and where it clipped.

    Where A < 0 it is at most -dual_clip A: a token that has become many times likelier, and is bad, is not pushed down
    the harder. Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: Yu et al. 2025, arXiv
    2503.14476 (DAPO); dual clip: Ye et al. 2020, arXiv 1912.09729. With dual_clip above 1 + clip_high the two-sided
    clip of INTELLECT-2 (arXiv 2505.07291; TRL's `delta`), min(r, delta) in place of r, is the same number. The
    log-ratio is clamped to +-20 as in verl.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, where = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is None:
        return loss, where
    most = -dual_clip * advantages
    beyond = (advantages < 0) & (loss > most)
    return torch.where(beyond, most, loss), where | beyond


def truncated_weight_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """[T] -clip(r, 1 - clip_low, 1 + clip_high) A logprob, the clipped r without gradient, and where it clipped.

    Unlike with `clipped_surrogate` every token keeps a gradient. Source: MiniMax 2025, arXiv 2506.13585, equations 4
    and 5 (CISPO).
    """
    ratio = (logprobs - old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def soft_gate_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """[T] -f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)), and f's slope 4 s (1 - s) in (0, 1], 1 at r = 1.

    tau is `temperature_positive` where A > 0, `temperature_negative` elsewhere. Source: Gao et al. 2025, arXiv
    2511.20347 (SAPO).
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau = torch.where(advantages > 0, temperature_positive, temperature_negative)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantages, 4 * (gate * (1 - gate)).detach()


def sequence_means(values: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " T"]:
    """[T] the mean of `values` over the tokens in the loss of the token's sequence; 0.0 if it has none."""
    sequence = batch.sequence_index()
    sums = values.new_zeros(batch.num_sequences).index_add(0, sequence, torch.where(batch.loss_mask, values, 0.0))
    counts = values.new_zeros(batch.num_sequences).index_add(0, sequence, batch.loss_mask.to(values.dtype))
    return (sums / counts.clamp(min=1))[sequence]


def masked_mean(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Mean:
    """The mean over True tokens, as a sum and a count that add up over any split."""
    return Mean(float(values.detach()[mask].sum()), float(mask.sum()))
