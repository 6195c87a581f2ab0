"""The key-value cache in 8 bits."""

from typing import Any

import torch
from torch import Tensor, nn

FORMAT = torch.float8_e4m3fn
LIMIT = torch.finfo(FORMAT).max


def saturate(model: nn.Module, device: torch.device) -> None:
    """Makes attention replace what exceeds the largest number of `FORMAT` by that number.

    Workaround for torch before 2.12, whose conversion makes NaN of it (https://github.com/pytorch/pytorch/pull/178817);
    SGLang converts keys, values and, for FlashAttention, queries with it. Not needed any more once no SGLang that
    rlframe runs with needs an older torch.
    """
    if torch.full((), 2 * LIMIT, device=device).to(FORMAT).float().isnan():
        for layer in attention_of(model):
            layer.register_forward_pre_hook(within_limit)


def attention_of(model: nn.Module) -> list[nn.Module]:
    """Returns the attention layers of SGLang's model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def within_limit(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of an attention layer with queries, keys and values from -LIMIT to LIMIT. Layers that read
    the cache of others have neither keys nor values."""
    numbers = (each.clamp(-LIMIT, LIMIT) if isinstance(each, Tensor) else each for each in arguments[:3])
    return (*numbers, *arguments[3:])
