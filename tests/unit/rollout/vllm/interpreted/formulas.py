"""What kernels of decode steps compute, in PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


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
