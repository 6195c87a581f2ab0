"""From tokens to sequences."""

from jaxtyping import Float
from torch import Tensor

from rlframe.types.batch import Sequences


def sequence_sums(values: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " R"]:
    """[R] the sum of `values` over each sequence's tokens in the loss; 0.0 if it has none."""
    masked = values.where(batch.loss_mask, 0.0)
    return values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index(), masked)


def sequence_weights(weights: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " R"]:
    """[R] the weight that a sequence's tokens in the loss have in common; 0.0 if it has none."""
    return weights.new_zeros(batch.num_sequences).scatter_reduce(0, batch.sequence_index(), weights, "amax")
