"""Tokens whose advantage and logprob are large together: those that take the most entropy away.

Source: Cui et al. 2025, arXiv 2505.22617, equations 10 to 12. A token's covariance is (logprob - mean) * (advantage -
mean) over the tokens in the loss. Here both are those of the rollout batch before its first update, so that neither
ranks nor micro-batches nor later updates change the choice; the authors' code and verl take the policy of the moment
over a micro-batch.
"""

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


def drawn(
    candidates: Bool[Tensor, " T"], count: int, *, token_ids: Int[Tensor, " T"], values: Float[Tensor, " T"]
) -> Bool[Tensor, " T"]:
    """Returns [T] True at `count` of the candidates, drawn by a hash of token and value, and at those of equal hash.

    A draw that depends on what is drawn, and on no order or generator, is the same however the batch is laid out.
    """
    bits = values.float().contiguous().view(torch.int32).long() ^ token_ids
    hashed = (bits * KNUTH % 2**32).double()
    return greatest(hashed.where(candidates, -torch.inf), count)
