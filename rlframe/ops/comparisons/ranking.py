"""Losses and ranks over the list of documents of each query."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def list_log_softmax(scores: Float[Tensor, " R"], group: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Returns [R] the log of exp(score) divided by the sum of exp(scores) of the same group. Groups may be in any order
    and may have gaps."""
    groups, index = torch.unique(group, return_inverse=True)
    empty = scores.new_zeros(len(groups))
    peak = empty.scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
    shifted = scores - peak[index]
    return shifted - empty.index_add(0, index, shifted.exp()).log()[index]


def list_sizes(group: Int[Tensor, " R"], counted: Bool[Tensor, " R"]) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Returns [N] the groups, and [N] the number of each one's documents that count."""
    groups, index = torch.unique(group, return_inverse=True)
    return groups, torch.zeros_like(groups).index_add(0, index, counted.long())


def first_relevant_ranks(
    scores: Float[Tensor, " R"], relevant: Bool[Tensor, " R"], group: Int[Tensor, " R"]
) -> Int[Tensor, " N"]:
    """Returns [N] the rank, from 1, of the first relevant document of each group that has one, in the order of scores.
    Documents of equal score rank before it."""
    ranks = []
    for number in torch.unique(group[relevant]):
        members = group == number
        best = scores[members & relevant].max()
        ranks.append(1 + int((scores[members & ~relevant] >= best).sum()))
    return torch.tensor(ranks, dtype=torch.int64)
