"""The driver's message to a rank: sequences with their token weights, which the rank cuts. Imports no megatron."""

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.megatron.transfer import upload
from rlframe.ops.packing import distribute, split_into_microbatches
from rlframe.ops.prefixes import share_prefixes
from rlframe.types.batch import Batch, Sequences
from rlframe.types.sent import Sent, received, sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One packed forward (and backward) pass of one rank."""

    batch: Sequences
    """The sequences; a TrainBatch for online losses. May be empty: the rank then only takes part in collectives."""
    weights: Float[Tensor, " T"]
    """[T] weight of each token's loss in the optimizer step. Zeros if nothing is trained."""

    def emptied(self) -> "Microbatch":
        """Returns a micro-batch of the same kind without a sequence."""
        return Microbatch(batch=self.batch.select([]), weights=self.weights[:0])

    def to(self, device: torch.device) -> "Microbatch":
        """Returns the same on `device`."""
        if device.type == "cpu":
            return self
        batch = self.batch.each(lambda value, _: upload(value, device))
        return Microbatch(batch=batch, weights=upload(self.weights, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A data-parallel rank's part of one optimizer step, or of an evaluation, in one piece."""

    batch: Sequences
    """The sequences of all its micro-batches, one micro-batch after the other."""
    weights: Float[Tensor, " T"]
    """[T] see Microbatch."""
    counts: list[int]
    """Number of sequences of each micro-batch."""

    def microbatches(self) -> list[Microbatch]:
        """Returns the micro-batches. Their tensors are parts of the share's, not copies."""
        ends = accumulate(self.counts)
        batches = [self.batch.part(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        weights = self.weights.split([batch.num_tokens for batch in batches])
        return [Microbatch(batch=batch, weights=own) for batch, own in zip(batches, weights, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the weights as an array, as the batch does its tensors."""
        return _unpickled, (sent({known.name: getattr(self, known.name) for known in fields(self)}),)


def _unpickled(message: Sent) -> Share:
    return Share(**received(message))


def optimizer_steps(batch: Sequences, *, num_minibatches: int, epochs_per_batch: int) -> list[range]:
    """Returns the sequences of each optimizer step of a batch. In each epoch every sequence occurs once, in order, in
    `num_minibatches` parts with equally many groups. A sequence without a group is a group of its own."""
    groups = batch.group if isinstance(batch, Batch) else torch.arange(batch.num_sequences)
    _, sizes = torch.unique_consecutive(groups, return_counts=True)
    num_groups, rest = divmod(len(sizes), num_minibatches)
    assert not rest, "refused by config.check"
    bounds = [0, *torch.cumsum(sizes, 0)[num_groups - 1 :: num_groups].tolist()]
    return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)] * epochs_per_batch


def split(
    batch: Sequences, weights: Float[Tensor, " T"], *, num_ranks: int, max_tokens: int, share_prompts: bool = False
) -> tuple[list[Share], list[list[list[int]]]]:
    """Returns the share of each data-parallel rank, and the sequence indices of its micro-batches. Units stay whole.

    Args:
        share_prompts: whether first tokens that the sequences of a family have in common are computed, and count in
            `max_tokens`, once.
    """
    lengths = batch.lengths.tolist()
    limits = {"num_ranks": num_ranks, "max_tokens": max_tokens}
    if share_prompts:
        sharing = share_prefixes(batch, **limits)
        plan = distribute(sharing.bundles, sharing.sizes(lengths), **limits)
        batch = replace(batch, shared=torch.tensor(sharing.shared, dtype=torch.int64))
    else:
        plan = split_into_microbatches(lengths, units=batch.units().tolist(), **limits)
    pieces = weights.split(batch.lengths.tolist())

    def share(microbatches: list[list[int]]) -> Share:
        own = [index for indices in microbatches for index in indices]
        return Share(
            batch=batch.select(own),
            weights=torch.cat([pieces[index] for index in own]) if own else weights[:0],
            counts=[len(indices) for indices in microbatches],
        )

    return [share(microbatches) for microbatches in plan], plan


def join(results: list[list[Tensor]], plan: list[list[list[int]]], lengths: Tensor) -> Float[Tensor, "T *rest"]:
    """Returns [T] or [T, n] per-token results of all micro-batches, in the batch's order.

    Args:
        lengths: [R] number of rows of each sequence in the results; ones for results of [R] or [R, n].
    """
    # Not sequence by sequence: most have no rows where only those of kept rollouts are asked for. In numpy, whose
    # operators cost less on a few numbers.
    order = np.array([index for microbatches in plan for indices in microbatches for index in indices], dtype=np.int64)
    values = torch.cat([values for rank in results for values in rank]).float()
    rows = lengths.numpy()
    own = rows[order]
    places = np.arange(len(values)) + np.repeat((rows.cumsum() - rows)[order] - (own.cumsum() - own), own)
    joined = np.zeros((int(rows.sum()), *values.shape[1:]), dtype=np.float32)
    joined[places] = values.numpy()
    return torch.from_numpy(joined)
