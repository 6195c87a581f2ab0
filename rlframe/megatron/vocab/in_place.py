"""Weight gradients of the embeddings and of the output layer, added to the gradient buffer where they arise.

Autograd makes of each a matrix of the whole vocabulary for every micro-batch, in the number format of the weights, and
adds it to the buffer afterwards. With 151,936 tokens and a hidden size of 2,048 these are passes over 5 GB. The part of
the output layer can go once Megatron's `gradient_accumulation_fusion` works without APEX (see `accumulate_in_place`).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, layers
from torch import Tensor


def add_in_place(model: GPTModel, *, overlaps: bool, in_float32: bool) -> None:
    """Makes the model's embeddings and its output layer add their weight gradients to the gradient buffer. Must be
    called before the data-parallel wrapper is created.

    Embeddings do so only where their rank has the whole vocabulary, and not in Megatron's deterministic mode, because
    the rows of one token are added up in no fixed order. Nor into a buffer of 16 bits: a GPU would round after each
    row, and the gradient of a frequent token would stop growing. Autograd adds them up in float32.

    Args:
        overlaps: whether the buffer is reduced during the backward pass, for which Megatron waits for a gradient of
            each parameter. Embeddings would have none.
        in_float32: whether the buffer is float32 whatever the weights are.
    """
    if model.post_process and isinstance(model.output_layer, ColumnParallelLinear):
        # Megatron calls APEX's kernels by this name, and looks for them only where its own switch is on.
        layers.fused_weight_gradient_mlp_cuda = WeightGradients
        model.output_layer.forward = partial(_output, model.output_layer, model.output_layer.forward)
    if model.pre_process:
        embeddings = model.embedding.word_embeddings
        exact = in_float32 or embeddings.weight.dtype is torch.float32
        if embeddings.tp_group.size() == 1 and not embeddings.deterministic_mode and not overlaps and exact:
            embeddings.forward = partial(_embedded, embeddings, embeddings.forward)
            # Megatron makes zeros of the vocabulary's size for the sum with the gradient of tied embeddings.
            embeddings.weight.zero_out_wgrad = False


class WeightGradients:
    """Transformer Engine's matrix product in the place of APEX's kernels."""

    @staticmethod
    def wgrad_gemm_accum_fp32(
        states: Float[Tensor, "T H"], grad: Float[Tensor, "T V"], total: Float[Tensor, "V H"]
    ) -> None:
        """Adds the gradient of a weight to `total`, whose number format may be another."""
        from transformer_engine.pytorch.cpp_extensions import general_gemm  # noqa: PLC0415 - not on a CPU

        general_gemm(states, grad, out_dtype=total.dtype, layout="NT", out=total, accumulate=True, grad=True)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
    """The same for a buffer of 16 bits."""


class EmbeddedInPlace(torch.autograd.Function):
    """Rows of a weight, whose gradients are added to the rows of its gradient buffer."""

    @staticmethod
    def forward(ctx: Any, token_ids: Int[Tensor, "1 T"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "1 T H"]:
        """Keeps the tokens."""
        ctx.save_for_backward(token_ids)
        ctx.weight = weight
        return F.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "1 T H"]) -> tuple[None, None]:
        """Returns no gradient of the weight."""
        total: Tensor = ctx.weight.main_grad
        total.index_add_(0, ctx.saved_tensors[0].flatten(), grad.flatten(0, 1).to(total.dtype))
        return None, None


def _output(
    layer: ColumnParallelLinear, compute: Any, states: Tensor, weight: Tensor | None = None, **options: Any
) -> Any:
    """Takes the place of the output layer's forward. Tied embeddings come as an argument."""
    layer.gradient_accumulation_fusion = hasattr(layer.weight if weight is None else weight, "main_grad")
    return compute(states, weight=weight, **options)


def _embedded(layer: VocabParallelEmbedding, compute: Any, token_ids: Tensor) -> Tensor:
    """Takes the place of the embeddings' forward. Copies of the weight in another number format have no buffer."""
    weight = layer.weight
    if not (torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad")):
        return compute(token_ids)
    return EmbeddedInPlace.apply(token_ids, weight)
