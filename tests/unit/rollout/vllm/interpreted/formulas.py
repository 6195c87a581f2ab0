"""What kernels of decode steps compute, in PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


def normed_and_rotated(
    qkv: Tensor,
    positions: Tensor,
    angles: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    query_heads: int,
    key_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """What layers of Llama (without norms) and Qwen 3 do to queries and keys: halves of a head are rotated against each
    other."""
    size = angles.shape[1]
    query, key, _ = qkv.unflatten(1, (-1, size)).split([query_heads, key_heads, key_heads], 1)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, (size,), query_norm, epsilon), rms_norm(key, (size,), key_norm, epsilon)
    cos, sin = angles[positions][:, None].chunk(2, -1)

    def rotated(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(1)

    return rotated(query), rotated(key)


def between_attentions(
    attended: Tensor,
    residual: Tensor,
    output: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    next_norm: Tensor | None,
    next_product: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """What `rlframe::between` returns, in the numbers' own type."""
    middle = attended @ output.T + residual
    gate, up = (rms_norm(middle, norm.shape, norm, epsilon) @ gate_up.T).chunk(2, -1)
    result = (silu(gate) * up) @ down.T
    if next_norm is None or next_product is None:
        return result, middle
    total = result + middle
    product = rms_norm(total, next_norm.shape, next_norm, epsilon) @ next_product.T
    return product if bias is None else product + bias, total
