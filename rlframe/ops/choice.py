"""Choice of the tokens of a batch that an algorithm treats differently: by the covariance of advantage and logprob, or
by entropy.

Source of the covariance: Cui et al. 2025, arXiv 2505.22617; a token's covariance is (logprob - mean) * (advantage -
mean) over the tokens in the loss. Source of the entropy: Wang et al. 2025, arXiv 2506.01939. Here both look at the
rollout batch before its first update, so that neither ranks nor micro-batches nor later updates change the choice; the
authors' code, verl and TRL use the present policy over a micro-batch.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

KNUTH = 2_654_435_761
"""Multiplier of Knuth's hash (The Art of Computer Programming, volume 3, section 6.4): 2^32 over the golden ratio."""


def covariances(
    logprobs: Float[Tensor, " T"], advantages: Float[Tensor, " T"], mask: Bool[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Returns [T] each token's share of the covariance; -inf outside the mask."""
    if not bool(mask.any()):
        return torch.full_like(logprobs, -torch.inf)
    share = (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean())
    return share.where(mask, -torch.inf)


def greatest(values: Float[Tensor, " T"], count: int) -> Bool[Tensor, " T"]:
    """Returns [T] True at the `count` greatest values above -inf, and at those equal to the last of them."""
    found = values[values > -torch.inf]
    if not found.numel():
        return torch.zeros_like(values, dtype=torch.bool)
    return values >= found.topk(min(count, found.numel())).values[-1]


def above_quantile(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"], fraction: float) -> Bool[Tensor, " T"]:
    """Returns [T] True at values of the mask at or above its (1 - fraction) quantile, interpolated as in torch."""
    count = int(mask.sum())
    # Not torch.quantile, which accepts at most 2^24 values.
    below = math.ceil((1 - fraction) * (count - 1) - 1e-9)
    return greatest(values.where(mask, -torch.inf), count - below)


def drawn(
    candidates: Bool[Tensor, " T"], count: int, *, token_ids: Int[Tensor, " T"], values: Float[Tensor, " T"]
) -> Bool[Tensor, " T"]:
    """Returns [T] True at `count` of the candidates, drawn by a hash of token and value, and at those of equal hash.

    The draw depends only on what is drawn, not on an order or a generator, so it is the same for every layout of the
    batch.

    Args:
        values: any number of each token that is the same to the last bit in every layout, such as the engine's logprob.
    """
    bits = values.float().contiguous().view(torch.int32).long() ^ token_ids
    hashed = (bits * KNUTH % 2**32).double()
    return greatest(hashed.where(candidates, -torch.inf), count)
