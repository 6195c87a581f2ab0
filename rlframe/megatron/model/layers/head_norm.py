"""Norms of the single heads of queries and keys, on a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class HeadNorm(torch.nn.Module):
    """Root-mean-square normalisation over a head's dimension, by torch's own kernels, in float32, rounded once.

    Transformer Engine 2.20's norm makes a chain of operations of it, which costs the host 0.16 ms forward and as much
    backward. torch's takes 0.03 ms each, and its kernels a third longer on the GPU: of a training step of 3.4 s 0.04 s
    (docs/performance.md). Source of the formula: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        assert not config.layernorm_zero_centered_gamma, "Transformer Engine's norm is kept for these"
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # By this mark Megatron adds up the gradients of ranks that each saw a slice of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, heads: Tensor | None) -> Tensor:
        """Returns [..., D] normalised over D. Without heads it returns its weight [D], for `QueryKeyAttention`."""
        return self.weight if heads is None else F.rms_norm(heads, self.weight.shape, self.weight, self.eps)
