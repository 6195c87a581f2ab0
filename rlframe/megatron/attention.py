"""Attention and normalisation for Megatron's local layer spec: what Transformer Engine gives on CUDA, for CPU ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RmsNorm(torch.nn.Module):
    """Root-mean-square normalisation that takes part in sequence parallelism.

    Megatron's local norm refuses sequence parallelism. All it needs is the mark on the weight, by which
    `finalize_model_grads` adds up the gradients of the ranks that each saw a slice of the tokens.
    Source: Zhang and Sennrich 2019, arXiv 1910.07467, equation 4; computed in float32 as in transformers' Qwen3RMSNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] normalised over H."""
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype) * self.weight


def length_buckets(lengths: list[int]) -> list[list[int]]:
    """Sequence indices grouped so that padding a group to its longest at most doubles its tokens."""
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        buckets.setdefault(max(length, 1).bit_length(), []).append(index)
    return [buckets[key] for key in sorted(buckets)]


class PackedLayout:
    """Where each token of a packed micro-batch sits in right-padded [sequence, position] grids, one grid per bucket.

    Right padding needs no mask under causal attention: a real query never looks to its right.
    """

    def __init__(self, cu_seqlens: Tensor):
        starts, lengths = cu_seqlens[:-1].tolist(), (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        self.grids: list[tuple[Tensor, Tensor]] = []
        for bucket in length_buckets(lengths):
            if not (width := max(lengths[i] for i in bucket)):
                continue
            start = torch.tensor([starts[i] for i in bucket])[:, None]
            length = torch.tensor([lengths[i] for i in bucket])[:, None]
            position = torch.arange(width)[None, :]
            real = position < length
            # Padding repeats the sequence's last token: any valid row will do, its output is never read.
            self.grids.append((start + torch.minimum(position, length - 1), real))


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences with `scaled_dot_product_attention`; honours PackedSeqParams (THD)."""

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, *_: Any, **__: Any):
        super().__init__()
        assert config.context_parallel_size == 1, "refused by config.check"
        self.softmax_scale = config.softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[T, 1, heads * head_dim] from query [T, heads, head_dim] and key, value [T, kv_heads, head_dim]."""
        assert packed_seq_params is not None and attention_bias is None
        if not hasattr(packed_seq_params, "layout"):
            packed_seq_params.layout = PackedLayout(packed_seq_params.cu_seqlens_q)
        output = torch.zeros_like(query)
        for rows, real in packed_seq_params.layout.grids:
            grid_query, grid_key, grid_value = (
                tensor[rows].transpose(1, 2) for tensor in (query, key, value)
            )  # [sequence, heads, position, head_dim]
            grid = F.scaled_dot_product_attention(
                grid_query, grid_key, grid_value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            output = output.index_put((rows[real],), grid.transpose(1, 2)[real])
        return output.reshape(output.shape[0], 1, -1)
