"""Reductions from tokens to sequences."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.types.batch import Sequences


def sequence_sums(values: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " R"]:
    """Returns [R] the sum of `values` over each sequence's tokens in the loss; 0.0 if it has none."""
    masked = values.where(batch.loss_mask, 0.0)
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index(), masked)


def sequence_weights(weights: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " R"]:
    """Returns [R] the common weight of a sequence's tokens in the loss. 0.0 if it has none."""
    return weights.new_zeros(batch.num_sequences).scatter_reduce(0, batch.sequence_index(), weights, "amax")


def last_outputs(values: Float[Tensor, "T C"], batch: Sequences) -> Float[Tensor, "R C"]:
    """Returns [R, C] the outputs at each sequence's last token in the loss."""
    return values[last_tokens(batch)]


def last_tokens(batch: Sequences) -> Int[Tensor, " R"]:
    """Returns [R] the position in the pack of each sequence's last token in the loss, or of its last token if none is
    in the loss."""
    ends = torch.cumsum(batch.lengths, 0) - 1
    places = torch.arange(batch.num_tokens, device=ends.device).where(batch.loss_mask, -1)
    last = torch.full_like(ends, -1).scatter_reduce(0, batch.sequence_index(), places, "amax")
    return last.where(last >= 0, ends)
