"""The driver's message to a rank: sequences with their token weights. Imports no megatron."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.ops.packing import split_into_microbatches
from rlframe.types.batch import Batch, Sequences
from rlframe.types.sent import Sent, received, sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One packed forward (and backward) pass of one rank."""

    batch: Sequences
    """The sequences; a TrainBatch for online losses. May be empty: the rank then only takes part in collectives."""
    weights: Float[Tensor, " T"]
    """[T] weight of each token's loss in the optimizer step. Zeros if nothing is trained."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the weights as bytes, as the batch does its tensors."""
        return _unpickled, (self.batch, sent({"weights": self.weights}))

    def emptied(self) -> "Microbatch":
        """Returns a micro-batch of the same kind without a sequence."""
        return Microbatch(batch=self.batch.select([]), weights=self.weights[:0])

    def to(self, device: torch.device) -> "Microbatch":
        """Returns the same on `device`."""
        if device.type == "cpu":
            return self
        moved = self.batch.each(lambda value, _: value.to(device, non_blocking=True))
        return Microbatch(batch=moved, weights=self.weights.to(device, non_blocking=True))


def _unpickled(batch: Sequences, message: Sent) -> Microbatch:
    return Microbatch(batch=batch, **received(message))


def optimizer_steps(batch: Sequences, *, num_minibatches: int, epochs_per_batch: int) -> list[list[int]]:
    """Returns the sequences of each optimizer step of a batch. In each epoch every sequence occurs once, in order, in
    `num_minibatches` parts with equally many groups. A sequence without a group is a group of its own."""
    groups = batch.group if isinstance(batch, Batch) else torch.arange(batch.num_sequences)
    _, sizes = torch.unique_consecutive(groups, return_counts=True)
    num_groups, rest = divmod(len(sizes), num_minibatches)
    assert not rest, "refused by config.check"
    bounds = [0, *torch.cumsum(sizes, 0)[num_groups - 1 :: num_groups].tolist()]
    return [list(range(*pair)) for pair in zip(bounds, bounds[1:], strict=False)] * epochs_per_batch


def split(
    batch: Sequences, weights: Float[Tensor, " T"], *, num_ranks: int, max_tokens: int
) -> tuple[list[list[Microbatch]], list[list[list[int]]]]:
    """Returns micro-batches by data-parallel rank, and the sequence indices of each. Units stay whole."""
    plan = split_into_microbatches(
        batch.lengths.tolist(), num_ranks=num_ranks, max_tokens=max_tokens, units=batch.units().tolist()
    )
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    bounds = list(zip(starts.tolist(), (starts + batch.lengths).tolist(), strict=True))

    def microbatch(indices: list[int]) -> Microbatch:
        pieces = [weights[slice(*bounds[i])] for i in indices]
        return Microbatch(batch=batch.select(indices), weights=torch.cat(pieces) if pieces else weights[:0])

    return [[microbatch(indices) for indices in rank] for rank in plan], plan


def join(results: list[list[Tensor]], plan: list[list[list[int]]], lengths: Tensor) -> Float[Tensor, "T *rest"]:
    """Returns [T] or [T, n] per-token results of all micro-batches, in the batch's order.

    Args:
        lengths: [R] number of rows of each sequence in the results; ones for results of [R] or [R, n].
    """
    joined = torch.zeros(int(lengths.sum()), *results[0][0].shape[1:], dtype=torch.float32)
    starts = (torch.cumsum(lengths, 0) - lengths).tolist()
    for rank, microbatches in zip(results, plan, strict=True):
        for values, indices in zip(rank, microbatches, strict=True):
            for index, piece in zip(indices, values.split([int(lengths[i]) for i in indices]), strict=True):
                joined[starts[index] : starts[index] + len(piece)] = piece
    return joined
