"""Random weights for training from scratch, identical for every layout of the ranks that load them."""

import hashlib
import re
from typing import Any

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
"""Standard deviation of GPT-2, and the default `initializer_range` of transformers' configs."""
NORM = re.compile(r"norm(_embedding|_hidden)?\.weight$")
"""End of the name of a norm's weight, also of those in Qwen's head for multi-token prediction."""
GATED_NORM = "linear_attn.norm.weight"
"""End of the name of the norm in a gated delta net, whose factor is the weight in every family."""


def random_tensor(
    name: str, shape: tuple[int, ...], *, zero_centered_norms: bool, seed: int, device: str = "cpu"
) -> Tensor:
    """Returns a Hugging Face tensor of `shape`, float32: of norms what makes their factor 1, zeros for biases, else
    normal with std 0.02.

    The values depend only on name, shape, seed and the kind of device, so every rank can draw the parts it holds.

    Args:
        zero_centered_norms: of the `Architecture`: whether the factor of norms is 1 + weight.
        device: cpu or a GPU. On a GPU a large model takes seconds; its values differ from the CPU's.
    """
    # Engines load under a default number format of their own.
    kind: Any = {"dtype": torch.float32, "device": device}
    if NORM.search(name):
        centered = zero_centered_norms and not name.endswith(GATED_NORM)
        return torch.zeros(shape, **kind) if centered else torch.ones(shape, **kind)
    if name.endswith("bias"):
        return torch.zeros(shape, **kind)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))
    return torch.randn(shape, generator=generator, **kind) * STANDARD_DEVIATION
