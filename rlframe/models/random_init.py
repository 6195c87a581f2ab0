"""Random weights for training from scratch, the same whatever the layout of the ranks that load them."""

import hashlib

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
"""GPT-2's, and the default `initializer_range` of transformers' configs."""


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """A Hugging Face tensor of `shape`, float32: ones for norms, zeros for biases, else normal with std 0.02.

    Depends on nothing but name, shape and seed, so every rank can make the pieces it holds.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(shape, generator=generator) * STANDARD_DEVIATION
