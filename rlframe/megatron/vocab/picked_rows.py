"""An output layer that computes the logits of some tokens only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


class PickedRows:
    """Lets through to Megatron's output layer only the states of the tokens that are picked."""

    def __init__(self, layer: torch.nn.Module):
        self._compute, self._rows = layer.forward, None
        layer.forward = self._forward

    @contextmanager
    def of(self, rows: Int[Tensor, " N"] | None) -> Iterator[None]:
        """Makes the model return the logits [1, N, V_local] of these rows. None picks all."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _forward(self, states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Takes the place of the layer's forward."""
        picked = states if self._rows is None else Picked.apply(states, self._rows)
        return self._compute(picked, *arguments, **options)


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
