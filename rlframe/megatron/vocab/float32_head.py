"""The output layer with logits in float32 from states and weights of 16 bits (`model.float32_logits`)."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor

from rlframe.ops.float32_logits import float32_logits


def keep_float32(layer: ColumnParallelLinear) -> None:
    """Makes Megatron's output layer, which has no bias, return logits in float32."""
    layer.forward = partial(_forward, layer)


def _forward(
    layer: ColumnParallelLinear, states: Float[Tensor, "T_rank 1 H"], weight: Tensor | None = None, **_: Any
) -> tuple[Float[Tensor, "T 1 V_local"], None]:
    """Takes the place of the layer's forward. Tied embeddings come as an argument."""
    rows = states.squeeze(1)
    if layer.tp_group.size() > 1:
        # Sequence parallelism, and each rank has its own columns: the gradients of the states are summed.
        rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=layer.tp_group)
    return Float32Product.apply(rows, layer.weight if weight is None else weight).unsqueeze(1), None


class Float32Product(torch.autograd.Function):
    """`float32_logits` with the gradients of a product in the operands' number format."""

    @staticmethod
    def forward(ctx: Any, states: Float[Tensor, "T H"], weight: Float[Tensor, "V_local H"]) -> Tensor:
        """Keeps the operands."""
        ctx.save_for_backward(states, weight)
        return float32_logits(states, weight)

    @staticmethod
    def backward(ctx: Any, grad_logits: Float[Tensor, "T V_local"]) -> Any:
        """Rounds the gradient of the logits, which is rounded without float32 logits too."""
        states, weight = ctx.saved_tensors
        rounded = grad_logits.to(weight.dtype)
        of_states, of_weight = ctx.needs_input_grad
        return rounded @ weight if of_states else None, rounded.t() @ states if of_weight else None
