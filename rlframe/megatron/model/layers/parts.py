"""Parts of a layer in places where Megatron has others: norms after attention and MLP, norms over all heads, gelu; and
factors."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from torch import Tensor

from rlframe.megatron.compat import submodules
from rlframe.megatron.model.layers.core_attention import adjusted
from rlframe.megatron.model.layers.rope import AttentionOfLayer
from rlframe.models.families.base import Architecture


def set_parts(architecture: Architecture, config: TransformerConfig, layer: ModuleSpec, *, norm: Any) -> None:
    """Puts the parts that the architecture needs into the specification of a layer.

    Args:
        norm: class of the norms of this device.
    """
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = adjusted(architecture, attention.core_attention)
    if architecture.qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = L2Norm
    if architecture.window_rope_theta is not None or architecture.qk_l2_norm:
        parts.self_attention.module = AttentionOfLayer
        parts.self_attention.params = {**parts.self_attention.params, "architecture": architecture}
    if not architecture.norm_before:
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        mlp = submodules(parts.mlp)
        attention.linear_qkv, mlp.linear_fc1 = without_norm(attention.linear_qkv), without_norm(mlp.linear_fc1)
    if architecture.norm_after:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(NormedAdd, params={"config": config, "norm": norm})
    if architecture.residual_scale != 1.0:
        assert not architecture.norm_after, "no family has both"
        parts.self_attn_bda = parts.mlp_bda = scaled_add(architecture.residual_scale)


def without_norm(linear: Any) -> Any:
    """Returns the class of a projection without the norm that Transformer Engine fuses with it."""
    from megatron.core.extensions.transformer_engine import (  # noqa: PLC0415 - without it these names are None
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
    )

    return TEColumnParallelLinear if linear is TELayerNormColumnParallelLinear else linear


class NormedAdd(torch.nn.Module):
    """Adds the norm of a part's output to the residual stream, in the place of Megatron's bias, dropout and sum."""

    def __init__(self, *, config: TransformerConfig, norm: Any):
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Any:
        """Returns `add`, as Megatron's own returns a function."""
        return self.add

    def add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """Returns [T, 1, H]."""
        hidden, bias = output
        assert bias is None and not dropout
        return residual + self.norm(hidden)


def scaled_add(factor: float) -> Any:
    """Returns what adds `factor` times a part's output to the residual stream, in the place of Megatron's bias, dropout
    and sum. The product is rounded before it is added, as in transformers and engines."""

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        hidden, bias = output
        assert bias is None and not dropout
        return residual + hidden * factor

    # Megatron takes a plain function as it is.
    return lambda training, fused: add


def gelu_tanh(gate: Tensor) -> Tensor:
    """Returns the tanh approximation of gelu (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(gate, approximate="tanh")


def scale_embeddings(model: GPTModel, architecture: Architecture) -> None:
    """Multiplies the embeddings by the architecture's factor before the first layer reads them."""
    factor = architecture.embedding_scale
    if factor == 1.0 or not model.pre_process:
        return

    def scaled(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * (torch.tensor(factor, dtype=output.dtype) if architecture.round_embedding_scale else factor)

    model.embedding.register_forward_hook(scaled)


def divide_logits(model: GPTModel, architecture: Architecture) -> None:
    """Divides the states that become logits, which are fewer numbers than the logits, by the architecture's divisor."""
    divisor = architecture.logits_divisor
    if divisor == 1.0 or not model.post_process or architecture.num_outputs is not None:
        return

    def divided(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs[0] / divisor, *inputs[1:]

    model.output_layer.register_forward_pre_hook(divided)
