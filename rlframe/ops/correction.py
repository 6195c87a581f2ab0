"""Corrections between two policies that should be equal: the engine's, which sampled, and the trainer's.

w = trainer / engine is the ratio of the probabilities that the two give the same token. In expectation, a surrogate
times w equals the surrogate of tokens that the trainer's policy sampled. Bounds on w trade some of that for a bounded
variance. Other projects use one word for different statistics, so here each has its own name. Sources: truncated
importance sampling, token and product: verl `rollout_corr_helper.py`; IcePop: slime `loss.py`; geometric mean: ms-swift
`grpo_trainer.py`, AReaL.
"""

import math
from enum import StrEnum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlframe.ops.kl import MAX_LOG_RATIO
from rlframe.ops.surrogate import sequence_means
from rlframe.types.batch import Sequences
from rlframe.types.results import EffectiveSize, Mean, MeanIfAny, Metric, Peak


class RatioOf(StrEnum):
    """Unit over which the ratio w is taken, over the tokens in the loss."""

    NONE = "none"
    """No ratio."""
    TOKEN = "token"
    """The ratio of the token."""
    SEQ_PROD = "seq_prod"
    """The product of the ratios of the sequence's tokens. It is unbiased, and grows or falls with their number."""
    SEQ_GEO = "seq_geo"
    """The geometric mean of the ratios of the sequence's tokens, which makes sequences of any length comparable."""


class MaskOf(StrEnum):
    """Statistics of trainer and engine that a mask bounds, over the tokens in the loss.

    The first three are ratios w = trainer / engine with two bounds, the others estimates in nats of KL(engine ||
    trainer), Schulman's k2 = d^2 / 2 and k3 = e^d - 1 - d with d = trainer - engine, with an upper bound. Source: verl
    `rollout_corr_helper.py`, whose `rollout_rs` k1 bounds are on engine / trainer and so the inverse of ours.
    """

    TOKEN = "token"
    """The token's ratio (verl's token_k1)."""
    SEQ_PROD = "seq_prod"
    """The product of the sequence's ratios (verl's seq_sum_k1)."""
    SEQ_GEO = "seq_geo"
    """The geometric mean of the sequence's ratios (verl's seq_mean_k1)."""
    TOKEN_K2 = "token_k2"
    """The token's k2."""
    TOKEN_K3 = "token_k3"
    """The token's k3."""
    SEQ_SUM_K2 = "seq_sum_k2"
    """The sum of the sequence's k2."""
    SEQ_SUM_K3 = "seq_sum_k3"
    """The sum of the sequence's k3."""
    SEQ_MEAN_K2 = "seq_mean_k2"
    """The mean of the sequence's k2."""
    SEQ_MEAN_K3 = "seq_mean_k3"
    """The mean of the sequence's k3."""
    SEQ_MAX_K2 = "seq_max_k2"
    """The greatest k2 of the sequence: one far-off token drops it all."""
    SEQ_MAX_K3 = "seq_max_k3"
    """The greatest k3 of the sequence."""


RATIOS = frozenset({MaskOf.TOKEN, MaskOf.SEQ_PROD, MaskOf.SEQ_GEO})
"""Statistics that are ratios. The others are in nats."""


def statistic(log_ratio: Float[Tensor, " T"], of: MaskOf, batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] the statistic of the token, or of its sequence, at every token.

    Args:
        log_ratio: nats, trainer - engine; arbitrary outside the loss.
    """
    if of in RATIOS:
        return engine_ratio(log_ratio, RatioOf(of.value), batch)
    scope, _, estimator = of.value.rpartition("_")
    d = torch.where(batch.loss_mask, log_ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    nats = d.square() / 2 if estimator == "k2" else d.expm1() - d
    if scope == "token":
        return nats
    if scope == "seq_mean":
        return sequence_means(nats, batch)
    how = "sum" if scope == "seq_sum" else "amax"
    # k2 and k3 are 0 outside the loss and never below 0 in it, so neither sum nor maximum depends on those tokens.
    sequence = batch.sequence_index()
    return nats.new_zeros(batch.num_sequences).scatter_reduce_(0, sequence, nats, how)[sequence]


def strayed(
    log_ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], batch: Sequences, *, limit_nats: float
) -> Bool[Tensor, " T"]:
    """Returns [T] True where the advantage is below 0 and the sequence's mean of -log_ratio is above limit_nats.

    Source: DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking; TRL's get_off_policy_mask.

    Args:
        log_ratio: nats, present policy - engine.
    """
    return (advantages < 0) & (sequence_means(-log_ratio, batch) > limit_nats)


def engine_ratio(log_ratio: Float[Tensor, " T"], of: RatioOf, batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] w by `of` at every token; exp() is applied to at most +-20. 1.0 with `none`, and outside the loss
    with `token`.

    Args:
        log_ratio: nats, trainer - engine; arbitrary outside the loss.
    """
    inside = torch.where(batch.loss_mask, log_ratio, 0.0)
    if of is RatioOf.NONE:
        return torch.ones_like(inside)
    if of is not RatioOf.TOKEN:
        sequence = batch.sequence_index()
        sums = inside.new_zeros(batch.num_sequences).index_add_(0, sequence, inside)
        if of is RatioOf.SEQ_GEO:
            counts = inside.new_zeros(batch.num_sequences).index_add_(0, sequence, batch.loss_mask.to(inside.dtype))
            sums = sums / counts.clamp(min=1)
        inside = sums[sequence]
    return inside.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def within(ratio: Float[Tensor, " T"], low: float | None, high: float | None) -> Bool[Tensor, " T"]:
    """Returns [T] low <= ratio <= high. A bound of None always holds."""
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        kept &= ratio >= low
    if high is not None:
        kept &= ratio <= high
    return kept


def engine_gap(log_ratio: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> dict[str, Metric]:
    """Returns metrics of the distance between trainer and engine on the tokens in the loss. With the same weights it
    should be small. A step without such tokens has none.

    The two KLs are estimates of KL(engine || trainer), Schulman's k1 and k3 (see `kl.py`) under the engine's samples:
    k1 = -d and k3 = e^d - d - 1 with d = trainer - engine. `logprob_gap_exp_mean` is the mean of e^|d|, at least 1;
    NeMo RL calls it token_mult_prob_error and warns above 1.05.
    """
    inside, count = torch.where(mask, log_ratio, 0.0), mask.sum()
    gap = inside.abs()
    # For a good engine k3 is 1e-14, which float32 rounds to noise.
    d = inside.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "rollout/logprob_gap_mean_nats": MeanIfAny(gap.sum(), count),
        "rollout/logprob_gap_max_nats": Peak(gap.where(mask, -math.inf).max() if gap.numel() else -math.inf),
        "rollout/logprob_gap_exp_mean": MeanIfAny(torch.where(mask, d.abs().exp(), 0.0).sum(), count),
        "rollout/engine_kl_k1_nats": MeanIfAny(-d.sum(), count),
        "rollout/engine_kl_k3_nats": MeanIfAny((d.expm1() - d).sum(), count),
    }


def spread(weights: Float[Tensor, " T"], kept: Bool[Tensor, " T"], mask: Bool[Tensor, " T"]) -> dict[str, Metric]:
    """Returns metrics of how much a correction keeps of the tokens in the loss.

    `rollout/effective_fraction` is their effective number (sum w)^2 / sum w^2 (Kish 1965) divided by their number: 1 if
    all weigh the same, 1 / N if one outweighs all others. `rollout/masked_fraction` is the fraction that masks drop.
    """
    inside, count = torch.where(kept & mask, weights, 0.0).double(), mask.sum()
    return {
        "rollout/effective_fraction": EffectiveSize(inside.sum(), inside.square().sum(), count),
        "rollout/masked_fraction": Mean((mask & ~kept).sum(), count),
    }
