"""The kernels of flash-linear-attention for gated delta nets over packed sequences: Triton, for CUDA, optional.

`gated_delta_rule` defines the computations; the three methods of `Kernels` correspond to its functions of the same
names. Queries and keys of length 1 and the states before chunks are rounded to the inputs' number format, which
`chunked` does not; the gated norm is rounded once, at its end.
"""

import logging
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

LOG = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """flash-linear-attention's functions."""

    causal_conv1d: Callable[..., Any]
    chunk_gated_delta_rule: Callable[..., Any]
    rms_norm_gated: Callable[..., Any]

    def convolve(self, values: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Returns the convolution with SiLU of `values` [T, C], a sequence at a time: [T, C]."""
        bounds = wide(cu_seqlens)
        return self.causal_conv1d(values[None], weight, activation="silu", cu_seqlens=bounds)[0][0]

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """Returns the outputs of the rule [T, value heads, value dim]."""
        tokens = (part[None] for part in (query, key, value, decay, rate))
        output, _ = self.chunk_gated_delta_rule(*tokens, use_qk_l2norm_in_kernel=True, cu_seqlens=wide(cu_seqlens))
        return output[0]

    def gated_norm(self, output: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the norm of `output` times SiLU of `gate` [T, value heads, value dim]."""
        return self.rms_norm_gated(output, gate, weight, None, eps=eps)


@cache
def load() -> Kernels | None:
    """Returns the kernels, or None if flash-linear-attention is not installed, which is said once."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d  # noqa: PLC0415 - optional
        from fla.modules.norm.fused_norm_gate import rms_norm_gated  # noqa: PLC0415
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: PLC0415

        from rlframe.megatron.packed import delta_gradients  # noqa: F401, PLC0415 - registers itself
    except ImportError as error:
        LOG.warning("gated delta nets are computed in plain PyTorch, slowly: fla-core 0.6 is not installed (%s)", error)
        return None
    return Kernels(causal_conv1d, chunk_gated_delta_rule, rms_norm_gated)


@lru_cache(maxsize=4)
def wide(cu_seqlens: Tensor) -> Tensor:
    """Returns the bounds as int64. Of one tensor it is always the same one, by which the kernels find what they have
    computed of it: otherwise each layer would wait for the device."""
    return cu_seqlens.long()
