"""Bounds of parts that follow one another."""

import torch
from torch import Tensor


def bounds_of(lengths: Tensor) -> Tensor:
    """Returns [R + 1] int32 bounds of parts that follow one another."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)
