"""Random weights for training from scratch, the same whatever the layout of the ranks that load them."""

import hashlib

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
"""GPT-2's, and the default `initializer_range` of transformers' configs."""


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int, device: str = "cpu") -> Tensor:
    """A Hugging Face tensor of `shape`, float32: ones for norms, zeros for biases, else normal with std 0.02.

    Depends on nothing but name, shape, seed and the kind of device, so every rank can make the pieces it holds.

    Args:
        device: cpu or cuda. On a GPU the tensors of a large model take seconds; the numbers are others than the CPU's.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(shape, generator=generator, device=device) * STANDARD_DEVIATION
