"""Products of all experts of a layer as one operation for autograd, on a GPU.

Transformer Engine's layer (2.20) gives autograd the weights of each expert. Then autograd keeps the input and the
weight of each expert, makes a gradient of each that nobody reads, and calls Megatron's hook of each, which does
nothing: in a profile 4.6 ms of the host for the backward pass of 128 experts. Here autograd knows the tokens alone.
Gradients of weights are added to Megatron's buffer, as Transformer Engine adds them. This file can go when Transformer
Engine's layer holds the weights of all experts as one parameter on Hopper (`single_grouped_weight`), and Megatron uses
it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframe.megatron.model.layers.expert_gradients import add_gradients, fits

WEIGHTS = "rlframe_weights"
"""Attribute of a layer that holds its `weights_of`."""


def install() -> None:
    """Makes Megatron's layers of experts use the operation, where it can take the place of Transformer Engine's. Must
    be called only where no gradient is sent before the backward pass has ended: Megatron's hooks begin that."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear  # noqa: PLC0415 - needs Transformer Engine

    own: Any = TEGroupedLinear.forward
    if not hasattr(own, "__wrapped__"):
        TEGroupedLinear.forward = by_one_operation(own)


def by_one_operation(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `forward` of Megatron's TEGroupedLinear, which gives tokens [T, O] and no bias."""

    @functools.wraps(own)
    def forward(self: Any, x: Tensor, m_splits: Any) -> Any:
        if not joins(self, x, m_splits):
            return own(self, x, m_splits)
        return ExpertProducts.apply(x, self, m_splits), None

    return forward


def joins(layer: Any, tokens: Tensor, counts: Any) -> bool:
    """Returns whether the operation computes what a layer would of these tokens: bfloat16 or float16 without bias, and
    gradients in a buffer."""
    if not isinstance(counts, list) or layer.use_bias or layer.config.fp8 or tokens.ndim != 2:
        return False
    weights = weights_of(layer)
    if weights[0].dtype != tokens.dtype or tokens.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not tokens.is_contiguous():
        return False
    if not weights[0].requires_grad or not torch.is_grad_enabled():
        return True
    gradients = [getattr(each, "main_grad", None) for each in weights]
    # Autograd comes here for the tokens alone.
    return tokens.requires_grad and None not in gradients and fits(gradients, tokens.dtype)


def weights_of(layer: Any) -> list[Any]:
    """Returns the parameters [O, I] of the experts of a layer."""
    if not hasattr(layer, WEIGHTS):
        setattr(layer, WEIGHTS, [getattr(layer, f"weight{index}") for index in range(layer.num_gemms)])
    return getattr(layer, WEIGHTS)


class ExpertProducts(torch.autograd.Function):
    """Products of tokens by expert [T, I] with the weights of their experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layer: Any, counts: list[int]) -> Tensor:
        """Returns [T, O].

        Args:
            layer: Megatron's TEGroupedLinear.
            counts: number of tokens of each expert.
        """
        ctx.save_for_backward(tokens)
        ctx.layer, ctx.counts = layer, counts
        return multiplied(weights_of(layer), tokens, counts, layout="TN")

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, None, None]:
        """Returns the gradient of the tokens, and adds those of the weights to their buffer."""
        (tokens,), above, weights = ctx.saved_tensors, above.contiguous(), weights_of(ctx.layer)
        gradient = multiplied(weights, above, ctx.counts, layout="NN") if ctx.needs_input_grad[0] else None
        if weights[0].requires_grad and len(tokens):
            add_gradients(tokens, above, [each.main_grad for each in weights], ctx.counts)
        return gradient, None, None


def multiplied(weights: Sequence[Tensor], rows: Tensor, counts: list[int], *, layout: str) -> Tensor:
    """Returns the products of rows by expert with the weights [O, I] of their experts.

    Args:
        layout: Transformer Engine's "TN" for rows [T, I] and products [T, O], "NN" for the other way.
    """
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm  # noqa: PLC0415 - needs CUDA

    out = rows.new_empty(len(rows), weights[0].shape[0 if layout == "TN" else 1])
    general_grouped_gemm(
        list(weights),
        list(rows.split(counts)),
        [out],
        quantization_params=[None] * len(weights),
        out_dtype=rows.dtype,
        layout=layout,
        m_splits=counts,
        grad=layout == "NN",
        single_output=True,
    )
    return out
