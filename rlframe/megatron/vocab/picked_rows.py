"""An output layer that computes the logits of some tokens only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class PickedRows:
    """Lets through to Megatron's output layer only the states of the tokens that are picked.

    Tensor-parallel ranks, which have states of a part of the tokens each, get equal shares of the picked ones, and
    gather these as they gather all. Adapters and whatever else is in the layer see nothing of it.
    """

    def __init__(self, layer: torch.nn.Module):
        self._rows: Tensor | None = None
        layer.register_forward_pre_hook(self._pick)

    @contextmanager
    def of(self, rows: Int[Tensor, " N"] | None) -> Iterator[None]:
        """Makes the model return the logits [1, N, V_local] of these rows. None picks all.

        Args:
            rows: positions among the tokens of all tensor-parallel ranks, of which N must be a multiple.
        """
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _pick(self, layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._rows is None:
            return None
        states, *others = arguments
        rows, group = self._rows, layer.tp_group
        if group.size() > 1:
            # A rank's gradients are those of its own rows; the backward pass sums them over the ranks.
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True, group=group)
            rows = rows.chunk(group.size())[group.rank()]
        return (Picked.apply(states, rows), *others)


class Picked(torch.autograd.Function):
    """Rows of a tensor, each at most once, so that their gradients have places of their own."""

    @staticmethod
    def forward(ctx: Any, states: Float[Tensor, "T *F"], rows: Int[Tensor, " N"]) -> Float[Tensor, "N *F"]:
        """Returns the rows."""
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        """Returns 0 for the other rows."""
        (rows,) = ctx.saved_tensors
        return above.new_zeros(ctx.count, *above.shape[1:]).index_copy_(0, rows, above), None
