"""Policy-gradient surrogates and their metrics."""

from enum import StrEnum

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
    ratio_cap: float | None = None,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Returns [T] max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - old), and True where it was
    clipped.

    Where A < 0 it is at most -dual_clip A, so that a bad token that has become much more likely has no larger gradient.
    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: Yu et al. 2025, arXiv 2503.14476
    (DAPO); dual clip: Ye et al. 2020, arXiv 1912.09729. ratio_cap is the two-sided clip of INTELLECT-2 (arXiv
    2505.07291; TRL's `delta`): min(r, ratio_cap) in place of the unclipped r. Above 1 + clip_high it acts as dual_clip;
    below, it limits tokens with a positive advantage, while others are still limited at 1 + clip_high. The log-ratio is
    clamped to +-20 as in verl.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if ratio_cap is not None:
        capped = -ratio.clamp(max=ratio_cap) * advantages
        loss = torch.maximum(capped, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
        return loss, loss != -ratio * advantages
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
    """Returns [T] -clip(r, 1 - clip_low, 1 + clip_high) A logprob, the clipped r without gradient, and True where it
    was clipped.

    Unlike with `clipped_surrogate` every token keeps a gradient. Source: MiniMax 2025, arXiv 2506.13585, equations 4
    and 5 (CISPO).
    """
    ratio = (logprobs - old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def geometric_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    batch: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Returns [T] -s A, s the geometric mean of the sequence's clipped token ratios, and True where those were clipped.

    A token's log-ratio is clipped to [-clip_low, clip_high] nats, on the side to which the sign of its advantage moves
    it. Source: Zhao et al. 2025, arXiv 2507.20673 (GMPO). The gradient is that of the token's own part of the mean and
    takes the token's own advantage, in the form of GSPO-token (`sequence_ratios`): the paper's wherever a sequence's
    advantages are equal.
    """
    log_ratio, sign = logprobs - old_logprobs, advantages.sign()
    least = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
    own = sequence_means(least.detach(), batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + least - least.detach()
    return -own.exp() * advantages, (least != log_ratio) & (advantages != 0)


class Trust(StrEnum):
    """Bounded distances between the old policy and the present one, of the sampled token against all others."""

    TV = "tv"
    """The total variation: the change of the token's probability."""
    KL = "kl"
    """The KL of the old distribution over (token, any other) from the present one, in nats."""


def trusted_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    trust: Trust,
    limit_low: float,
    limit_high: float,
    ratio_cap: float,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Returns [T] -min(r, ratio_cap) A logprob, the ratio without gradient, and True where the limits set it to 0.

    It is 0 where A > 0 and the token has become more likely by more than limit_high, or where A <= 0 and it has become
    less likely by more than limit_low. Source: arXiv 2602.04879 (DPPO), the binary divergences; cap and 1e-8 as in
    verl's compute_policy_loss_dppo_tv and _kl.
    """
    ratio = (logprobs - old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    now, before = logprobs.detach().exp(), old_logprobs.exp()
    moved = now - before
    if trust is Trust.KL:
        # A probability may be rounded to more than 1.
        rest_before, rest = (1 - before).clamp(min=0), (1 - now).clamp(min=0)
        nats = before * (old_logprobs - logprobs.detach()) + rest_before * ((rest_before + 1e-8) / (rest + 1e-8)).log()
        # With the sign of the movement, so that one comparison covers both.
        moved = nats * moved.sign()
    beyond = torch.where(advantages > 0, moved > limit_high, moved < -limit_low)
    return -torch.where(beyond, 0.0, ratio.clamp(max=ratio_cap)) * advantages * logprobs, beyond


def soft_gate_surrogate(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Returns [T] -f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)), and f's slope 4 s (1 - s) in (0, 1], 1 at r = 1.

    tau is `temperature_positive` where A > 0, `temperature_negative` elsewhere. Source: Gao et al. 2025, arXiv
    2511.20347 (SAPO).
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau = torch.where(advantages > 0, temperature_positive, temperature_negative)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantages, 4 * (gate * (1 - gate)).detach()


def sequence_ratios(
    logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: Sequences
) -> Float[Tensor, " T"]:
    """Returns [T] the log of GSPO-token's ratio: the value is the mean log-ratio of the sequence's tokens in the loss,
    the gradient that of the token's own logprob.

    log s_it = sg[mean log-ratio] + logprob - sg[logprob]. Source: Zheng et al. 2025, arXiv 2507.18071, section 4.3.
    """
    return sequence_means((logprobs - old_logprobs).detach(), batch) + logprobs - logprobs.detach()


def sequence_means(values: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] the mean of `values` over the tokens in the loss of the token's sequence; 0.0 if it has none."""
    sequence = batch.sequence_index()
    sums = values.new_zeros(batch.num_sequences).index_add(0, sequence, torch.where(batch.loss_mask, values, 0.0))
    counts = values.new_zeros(batch.num_sequences).index_add(0, sequence, batch.loss_mask.to(values.dtype))
    return (sums / counts.clamp(min=1))[sequence]


def masked_mean(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"], kind: type[Mean] = Mean) -> Mean:
    """Returns the mean over True tokens, as a sum and a count that add up over any split."""
    return kind(torch.where(mask, values.detach(), 0.0).sum(), mask.sum())
