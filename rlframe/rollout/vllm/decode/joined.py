"""vLLM's dense decoder layers that leave what lies between two attentions to one operation (`between`).

A layer then takes queries, keys and values in the place of hidden states, and returns those of the layer after it,
whose first norm and product it computes. This file can go when vLLM computes such steps by one kernel of its own.
"""

import functools
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlframe.rollout.vllm.decode.between import operation  # noqa: F401 - registers it
from rlframe.rollout.vllm.decode.between.launch import Layer, is_available, kernel_for, takes
from rlframe.rollout.vllm.decode.rotary import ROTATES, attended

LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""vLLM's classes whose `forward` is: add and norm, attention, add and norm, gated perceptron (0.26 to 0.32)."""
MODELS = ("LlamaModel", "Qwen2Model", "Qwen3Model")
"""vLLM's classes that have them, one after the other."""
JOINED = "rlframe_joined"
"""Attribute of a layer that leaves it to the operation: a tuple of the layer after it, if there is one. In a tuple a
module is no part of another. A `forward` that can has it, too, and so has vLLM's `additional_config`."""
ELSEWHERE = "_vllm_is_uva_offloaded"
"""Attribute of vLLM's weights that lie in the host's memory."""
logger = logging.getLogger(__name__)


def install(model: torch.nn.Module, config: Any) -> None:
    """Makes decoder layers of vLLM's `model` use the operation, where all of them can. To be done after the attention
    layers were made to rotate (`rotary.install`), and before vLLM compiles the model.

    Args:
        config: the VllmConfig. Its `additional_config` tells what was decided: vLLM keeps compiled models by it.
    """
    decoder: Any = next((each for each in model.modules() if _loops_over_layers(each)), None)
    is_joined = decoder is not None and _may_join(config) and _join(list(decoder.layers))
    config.additional_config = {**config.additional_config, JOINED: is_joined}


def _loops_over_layers(module: Any) -> bool:
    """Returns whether a module passes hidden states and residuals from layer to layer, with nothing between them."""
    kind = type(module)
    return kind.__name__ in MODELS and kind.__module__.startswith("vllm.")


def _may_join(config: Any) -> bool:
    """Returns whether nothing but the layers themselves has to do with what lies between two attentions."""
    from vllm import envs

    # Adapters stand in the place of products. Drafters may ask for hidden states between layers. Rows must not count
    # where results may not depend on what else is in a step.
    return config.lora_config is None and config.speculative_config is None and not envs.VLLM_BATCH_INVARIANT


def joins(layer: Any) -> bool:
    """Returns whether a module is a decoder layer between whose attention and the next one the operation computes what
    it would."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if type(layer).__name__ not in LAYERS or not type(layer).__module__.startswith("vllm."):
        return False
    if "forward" in vars(layer) or any(hasattr(weight, ELSEWHERE) for weight in layer.parameters()):
        # vLLM brings weights from the host's memory.
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    products = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return (
        getattr(attention, ROTATES, False)
        and type(mlp.act_fn) is SiluAndMul
        and all(type(norm) is RMSNorm and norm.has_weight and not norm.variance_size_override for norm in norms)
        and len({norm.variance_epsilon for norm in norms}) == 1
        and all(type(each.quant_method) is UnquantizedLinearMethod and each.tp_size == 1 for each in products)
        and all(each.bias is None for each in products[1:])
    )


def _join(layers: list[Any]) -> bool:
    """Makes consecutive layers use the operation, if it can take the place of all of them. Returns whether it does."""
    following = [(after,) for _, after in pairwise(layers)] + [()]
    pairs = list(zip(layers, following, strict=True))
    if not all(map(joins, layers)) or not all(takes(weights(layer, after)) for layer, after in pairs):
        return False
    norm = layers[0].input_layernorm.weight
    if norm.is_cuda and not _is_compiled(norm):
        return False
    for layer, after in pairs:
        setattr(layer, JOINED, after)
        kind: Any = type(layer)
        if not hasattr(kind.forward, JOINED):
            kind.forward = by_one_operation(kind.forward)
    return True


def _is_compiled(norm: Tensor) -> bool:
    """Compiles the kernel for the device of a norm, as nothing may be compiled while CUDA graphs are captured. Returns
    whether there is one."""
    if not is_available():
        logger.warning("decode steps of few sequences are slower without the package cuda-bindings")
        return False
    try:
        kernel_for(norm.device, len(norm))
    except RuntimeError as error:
        logger.warning("decode steps of few sequences are slower on this device: %s", error)
        return False
    return True


def weights(layer: Any, after: tuple[Any, ...]) -> Layer:
    """Returns the weights between the attention of a layer and that of the one after it, if there is one."""
    following = (None, None, None)
    if after:
        product = after[0].self_attn.qkv_proj
        following = after[0].input_layernorm.weight, product.weight, product.bias
    return Layer(
        layer.self_attn.o_proj.weight,
        layer.post_attention_layernorm.weight,
        layer.mlp.gate_up_proj.weight,
        layer.mlp.down_proj.weight,
        *following,
    )


def by_one_operation(own: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the `forward` of a class of decoder layers. Layers that are not joined keep `own`."""

    @functools.wraps(own)
    def forward(
        self: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        after = getattr(self, JOINED, None)
        if after is None:
            return own(self, positions, hidden_states, residual, **options)
        assert positions.ndim == 1, "positions of several kinds rotate in another way (`rotates_plainly`)"
        qkv = hidden_states
        if residual is None:
            residual = hidden_states
            qkv, _ = self.self_attn.qkv_proj(self.input_layernorm(hidden_states))
        result = attended(self.self_attn, positions, qkv)
        epsilon = self.post_attention_layernorm.variance_epsilon
        return torch.ops.rlframe.between(result, residual, *weights(self, after), epsilon)

    setattr(forward, JOINED, ())
    return forward
