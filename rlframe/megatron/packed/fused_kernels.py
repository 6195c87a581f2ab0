"""cuDNN's attention through Transformer Engine, without its choice among backends and with the softmax's sums."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_te_version
from torch import Tensor

from rlframe.megatron.packed.split_bounds import WIDEST_HEAD, Call

RELEASE = "2.20."
"""Releases of Transformer Engine whose functions have these parameters. Others were not read."""
CUDNN = (9, 6, 0)
"""cuDNN from which the logarithms of the sums are [T, heads, 1] (Transformer Engine 2.20, fused_attn_fwd)."""
CAPABILITIES = ((9, 0), (12, 0))
"""GPUs from the first and before the second. Older ones were not measured, and on 12.0 the logarithms have another
shape (the same release, context_parallel.py)."""
LAYOUT = {"qkv_layout": "thd_thd_thd", "o_format": "thd"}
EVERY_KEY = (None, (-1, -1), (-1, 0))
"""Transformer Engine's words for no sliding window."""


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """The kernels of `split_attention` on a GPU."""

    scale: float
    """Factor of the products of queries and keys."""

    @classmethod
    def of(cls, core: torch.nn.Module) -> "FusedKernels | None":
        """Returns the kernels for a core attention. None if it has others, or does more than they do."""
        # Megatron-Core imports it where it is installed and the device is a GPU.
        if sys.modules.get("transformer_engine") is None or not str(get_te_version()).startswith(RELEASE):
            return None
        from megatron.core.extensions.transformer_engine import TEDotProductAttention  # noqa: PLC0415 - see above
        from transformer_engine.pytorch.utils import get_cudnn_version  # noqa: PLC0415 - see above

        first, end = CAPABILITIES
        known = first <= torch.cuda.get_device_capability() < end and get_cudnn_version() >= CUDNN
        return cls(core.softmax_scale) if known and type(core) is TEDotProductAttention and is_plain(core) else None

    def takes(self, query: Tensor) -> bool:
        """Returns whether cuDNN computes queries of this kind."""
        return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `split_attention.Kernels`."""
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd  # noqa: PLC0415 - see above

        # Only what is training returns the logarithms.
        output, auxiliary = fused_attn_fwd(
            True, *_bounds(call), query, key, value, query.dtype, _backend(), **self._options(call)
        )
        lse, *rest = auxiliary
        assert lse.shape == (*query.shape[:2], 1), f"Transformer Engine's logarithms are {tuple(lse.shape)}"
        return output, lse, rest

    def backward(
        self,
        grad: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        lse: Tensor,
        rest: list[Tensor],
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `split_attention.Kernels`."""
        from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd  # noqa: PLC0415 - see above

        options = self._options(call) | {"do_format": "thd", "dqkv_layout": "thd_thd_thd"}
        found = fused_attn_bwd(*_bounds(call), *tensors, output, grad, grad.dtype, [lse, *rest], _backend(), **options)
        return found[0], found[1], found[2]

    def _options(self, call: Call) -> dict[str, Any]:
        return LAYOUT | {
            "attn_scale": self.scale,
            "attn_mask_type": "padding_causal" if call.causal else "padding",
            "cu_seqlens_q_padded": call.first_queries,
            "cu_seqlens_kv_padded": call.first_keys,
        }


def is_plain(core: Any) -> bool:
    """Returns whether a core attention of Transformer Engine is one softmax over all keys, on kernels that may add up
    gradients in any order. In deterministic mode Transformer Engine chooses by the kernels' memory, which grows with
    the square of the longest sequence."""
    width = core.hidden_size_per_attention_head_k
    return (
        os.environ.get("NVTE_FUSED_ATTN", "1") != "0"
        and width == core.hidden_size_per_attention_head_v <= WIDEST_HEAD
        and width % 8 == 0
        and core.window_size in EVERY_KEY
        and core.softmax_type == "vanilla"
        and core.attention_dropout == 0
        and core.cp_group is None
        and getattr(core, "num_splits", None) is None
        and not core.deterministic
        and not core.return_max_logit
        and not getattr(core, "softcap", 0)
    )


def _bounds(call: Call) -> tuple[int, int, Tensor, Tensor]:
    return call.most_queries, call.most_keys, call.queries, call.keys


def _backend() -> Any:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend  # noqa: PLC0415 - see above

    return FusedAttnBackend["F16_arbitrary_seqlen"]
