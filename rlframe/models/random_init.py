"""Random weights for training from scratch, identical for every layout of the ranks that load them."""

import hashlib
from typing import Any

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
"""Standard deviation of GPT-2, and the default `initializer_range` of transformers' configs."""


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int, device: str = "cpu") -> Tensor:
    """Returns a Hugging Face tensor of `shape`, float32: ones for norms, zeros for biases, else normal with std 0.02.

    The values depend only on name, shape, seed and the kind of device, so every rank can draw the parts it holds.

    Args:
        device: cpu or a GPU. On a GPU a large model takes seconds; its values differ from the CPU's.
    """
    # Engines load under a default number format of their own.
    kind: Any = {"dtype": torch.float32, "device": device}
    if name.endswith("norm.weight"):
        return torch.ones(shape, **kind)
    if name.endswith("bias"):
        return torch.zeros(shape, **kind)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(shape, generator=generator, **kind) * STANDARD_DEVIATION
