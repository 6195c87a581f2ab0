"""Products of all experts of a layer as one operation for autograd, by one kernel each, on a GPU.

Transformer Engine's layer (2.20) gives autograd the weights of each expert. Then autograd keeps the input and the
weight of each expert, makes a gradient of each that nobody reads, and calls Megatron's hook of each, which does
nothing: in a profile 4.6 ms of the host for the backward pass of 128 experts. Here autograd knows the tokens alone.
Gradients of weights are added to Megatron's buffer, as Transformer Engine adds them. This file can go when Transformer
Engine's layer holds the weights of all experts as one parameter on Hopper (`single_grouped_weight`), and Megatron uses
it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlframe.megatron.model.layers.experts.gradients import add_gradients, fits
from rlframe.megatron.model.layers.experts.products import DTYPES, multiplies, multiply
from rlframe.megatron.model.layers.experts.stacked import Stacked, stacked

HELD = "rlframe_held"
"""Attribute of a layer that holds its `Held`."""
JOINS = "rlframe_joins_experts"
"""Attribute of a model's configuration: whether its experts may be one operation. A policy and its teacher in the same
ranks may differ."""


@dataclass(frozen=True, slots=True)
class Held:
    """Weights of a layer and their gradients, as an operation needs them."""

    parameters: list[Any]
    """Weight [O, I] of each expert."""
    addresses: tuple[int, ...]
    """By which `held_by` sees that memory is another."""
    weights: Stacked | None
    """None where they do not lie one behind the other."""
    gradients: Stacked | None
    """None where there are none, or they do not lie so."""


def install() -> None:
    """Makes Megatron's layers of experts use the operation, where it can take the place of Transformer Engine's and
    the model's configuration has JOINS. It must have that only where no gradient is sent before the backward pass has
    ended: Megatron's hooks begin that."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear  # noqa: PLC0415 - needs Transformer Engine

    own: Any = TEGroupedLinear.forward
    if not hasattr(own, "__wrapped__"):
        TEGroupedLinear.forward = by_one_operation(own)


def by_one_operation(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `forward` of Megatron's TEGroupedLinear, which gives tokens [T, O] and no bias."""

    @functools.wraps(own)
    def forward(self: Any, x: Tensor, m_splits: Any) -> Any:
        held = joined(self, x, m_splits)
        return (ExpertProducts.apply(x, held, tuple(m_splits)), None) if held else own(self, x, m_splits)

    return forward


def joined(layer: Any, tokens: Tensor, counts: Any) -> Held | None:
    """Returns what the operation needs of a layer, if it computes what the layer would of these tokens: bfloat16 or
    float16 without bias, and gradients in a buffer."""
    if not getattr(layer.config, JOINS, False):
        return None
    if not isinstance(counts, list) or layer.use_bias or layer.config.fp8 or tokens.ndim != 2:
        return None
    # A pass in float32 is one on copies of the weights, which nothing may hold behind it.
    if tokens.dtype not in DTYPES or not tokens.is_contiguous():
        return None
    held = held_by(layer)
    if not held.weights or held.weights.matrix.dtype != tokens.dtype:
        return None
    if not held.parameters[0].requires_grad:
        return held
    # Autograd comes here for the tokens alone. Passes without gradients have the kernels of those with.
    comes = tokens.requires_grad or not torch.is_grad_enabled()
    return held if held.gradients and comes else None


def held_by(layer: Any) -> Held:
    """Returns what an operation needs of a layer. Looks at all experts only after memory has moved."""
    held: Held | None = getattr(layer, HELD, None)
    ends = [getattr(layer, f"weight{index}") for index in (0, layer.num_gemms - 1)]
    ends += [each.main_grad for each in ends if getattr(each, "main_grad", None) is not None]
    addresses = tuple(each.data_ptr() for each in ends)
    if held is None or held.addresses != addresses:
        parameters = [getattr(layer, f"weight{index}") for index in range(layer.num_gemms)]
        held = Held(parameters, addresses, *stacks(parameters))
        setattr(layer, HELD, held)
    return held


def stacks(parameters: list[Any]) -> tuple[Stacked | None, Stacked | None]:
    """Returns the weights of all experts and their gradients, each None where the kernels do not take them."""
    dtype = parameters[0].dtype
    weights = stacked(parameters)
    if not weights or not multiplies(weights):
        return None, None
    gradients = [getattr(each, "main_grad", None) for each in parameters]
    sums = None if any(each is None for each in gradients) else stacked(gradients)
    return weights, sums if sums and fits(sums, dtype) else None


class ExpertProducts(torch.autograd.Function):
    """Products of tokens by expert [T, I] with the weights of their experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, held: Held, counts: tuple[int, ...]) -> Tensor:
        """Returns [T, O].

        Args:
            counts: number of tokens of each expert.
        """
        assert held.weights, "`joined` was asked"
        ctx.save_for_backward(tokens)
        ctx.held, ctx.counts = held, counts
        return multiply(tokens, held.weights, counts, transposed=True)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, None, None]:
        """Returns the gradient of the tokens, and adds those of the weights to their buffer."""
        (tokens,), above, held = ctx.saved_tensors, above.contiguous(), ctx.held
        gradient = multiply(above, held.weights, ctx.counts, transposed=False) if ctx.needs_input_grad[0] else None
        if held.parameters[0].requires_grad and len(tokens):
            add_gradients(tokens, above, held.gradients, ctx.counts)
        return gradient, None, None
