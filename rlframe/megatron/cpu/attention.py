"""Attention, rotary embedding and normalisation for Megatron's local layers: Transformer Engine's part, for CPU ranks.

On a CPU these small operations cost as much as the matrix products. The two autograd functions pass over memory a third
as often as autograd's chain of single operations.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from rlframe.megatron.cpu.attention_masks import masked_attention
from rlframe.megatron.packed.context_parallel import (
    gather_tokens,
    heads_to_tokens,
    place_in,
    positions_of_rank,
    sharing,
    tokens_to_heads,
)


class RmsNorm(torch.nn.Module):
    """Root-mean-square normalisation that takes part in sequence parallelism.

    Megatron-Core 0.16.1's local norm refuses sequence parallelism. All it needs is the mark on the weight, by which
    `finalize_model_grads` adds up the gradients of the ranks that each saw a slice of the tokens. Source: Zhang and
    Sennrich 2019, arXiv 1910.07467, equation 4; computed in float32 as in transformers' Qwen3RMSNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [..., H] normalised over H."""
        weight = self.weight.float() + 1 if self.zero_centered else self.weight
        if hidden.dtype == torch.float32:
            return RmsNormFunction.apply(hidden, weight, self.eps)
        if self.zero_centered:
            return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).to(hidden.dtype)
        return F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype) * self.weight


class RmsNormFunction(torch.autograd.Function):
    """y = x r w with r = (mean x^2 + eps)^(-1/2), in float32.

    Backward, with n = x r and g = dy w: dx = r (g - n mean(g n)), dw = sum of dy n over tokens.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns [..., H], the normalised hidden states."""
        mean_square = torch.linalg.vecdot(hidden, hidden)[..., None] / hidden.shape[-1]
        scale = (mean_square + eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients of hidden and weight."""
        hidden, weight, scale = ctx.saved_tensors
        normalized = hidden * scale
        weighted = grad * weight
        mean = torch.linalg.vecdot(weighted, normalized)[..., None] / hidden.shape[-1]
        grad_weight = (grad * normalized).flatten(0, -2).sum(0)
        return weighted.addcmul_(normalized, mean, value=-1).mul_(scale), grad_weight, None


def rotary_thd(
    values: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Returns [T / cp, heads, D] with rotary positions applied, counted from 0 in each packed sequence.

    It replaces Transformer Engine's fused function behind `apply_rope_fusion`, hence its signature. Source: Su et al.
    2021, arXiv 2104.09864, equation 34, with the halves of a head as the pairs.

    Args:
        cu_seqlens: bounds of the sequences, all ranks' tokens counted.
        freqs: [longest sequence, 1, 1, D] angles; the second half of D repeats the first.
        interleaved: whether neighbours are the pairs. Only Megatron-Core 0.19 passes it; no family has it.
    """
    assert not interleaved
    positions = positions_of_rank(cu_seqlens, cp_size, cp_rank)
    angles = freqs[:, 0, :, : freqs.shape[-1] // 2]
    return RotaryFunction.apply(values, angles.cos()[positions], angles.sin()[positions])


class RotaryFunction(torch.autograd.Function):
    """Rotates (first half, second half) of each head by the token's angles; backward rotates back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Returns [T, heads, D] from cosine and sine [T, 1, D / 2]."""
        cosine, sine = cosine.to(values.dtype), sine.to(values.dtype)
        ctx.save_for_backward(cosine, sine)
        return rotate(values, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of values."""
        cosine, sine = ctx.saved_tensors
        return rotate(grad, cosine, -sine), None, None


def rotate(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Returns [T, heads, D]: first half times cosine minus second half times sine, second half times cosine plus first
    half times sine."""
    first, second = values.chunk(2, -1)
    rotated = torch.empty_like(values)
    out_first, out_second = rotated.chunk(2, -1)
    torch.mul(first, cosine, out=out_first).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=out_second).addcmul_(first, sine)
    return rotated


def length_buckets(lengths: list[int]) -> list[list[int]]:
    """Returns sequence indices in groups, such that padding a group to its longest sequence at most doubles its
    tokens."""
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        buckets.setdefault(max(length, 1).bit_length(), []).append(index)
    return [buckets[key] for key in sorted(buckets)]


class Grid(NamedTuple):
    """Sequences of similar length, right-padded to [sequence, position]."""

    query_rows: Tensor
    """[S, Q] row of each query among this rank's tokens."""
    is_query: Tensor
    """[S, Q] False where the grid is padded."""
    key_rows: Tensor
    """[S, K] row of each key among all keys: the whole pack's."""
    visible: Tensor | None
    """[S, 1, Q, K] True where the query may attend to the key. None for plain causal attention, where Q is K."""


class PackedRows:
    """Position of each token of a packed micro-batch in right-padded grids, one grid per bucket.

    Right padding needs no mask under causal attention, because a real query never attends to its right.
    """

    def __init__(self, cu_seqlens: Tensor, cp_size: int = 1, cp_rank: int = 0, key_bounds: Tensor | None = None):
        """
        Args:
            key_bounds: [R + 1] bounds of the sequences' keys, if they have more keys than queries, which then stand for
                the last ones.
        """
        if key_bounds is not None:
            self.grids = grids_with_more_keys(cu_seqlens, key_bounds)
            return
        starts, lengths = cu_seqlens[:-1].tolist(), (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        positions = positions_of_rank(cu_seqlens, cp_size, cp_rank)
        self.grids: list[Grid] = []
        for bucket in length_buckets(lengths):
            if not any(lengths[i] for i in bucket):
                continue
            device = cu_seqlens.device
            key_rows, is_key = padded_rows([starts[i] for i in bucket], [lengths[i] for i in bucket], device)
            if cp_size == 1:
                self.grids.append(Grid(key_rows, is_key, key_rows, None))
                continue
            query_rows, is_query = padded_rows(
                [starts[i] // cp_size for i in bucket], [lengths[i] // cp_size for i in bucket], device
            )
            visible = torch.arange(key_rows.shape[1], device=device) <= positions[query_rows][:, None, :, None]
            self.grids.append(Grid(query_rows, is_query, key_rows, visible))


def layout_of(packing: PackedSeqParams, *, whole: bool = False) -> PackedRows:
    """Returns the grids of a micro-batch, made once for all layers.

    Args:
        whole: whether this rank computes whole sequences, though others share the tokens.
    """
    if not hasattr(packing, "layout"):
        split = (1, 0) if whole else place_in(sharing(packing))
        more_keys = None if packing.cu_seqlens_kv is packing.cu_seqlens_q else packing.cu_seqlens_kv
        packing.layout = PackedRows(packing.cu_seqlens_q, *split, more_keys)
    return packing.layout


def grids_with_more_keys(query_bounds: Tensor, key_bounds: Tensor) -> list[Grid]:
    """Returns grids of sequences of which some have more keys than queries. Those with as many of both are in grids of
    their own, without a mask."""
    starts, key_starts = query_bounds[:-1].tolist(), key_bounds[:-1].tolist()
    lengths, key_lengths = query_bounds.diff().tolist(), key_bounds.diff().tolist()
    buckets: dict[tuple[int, int, bool], list[int]] = {}
    for index, (length, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        buckets.setdefault((length.bit_length(), keys.bit_length(), length == keys), []).append(index)
    grids = []
    for (_, _, alike), bucket in sorted(buckets.items()):
        device = query_bounds.device
        query_rows, is_query = padded_rows([starts[i] for i in bucket], [lengths[i] for i in bucket], device)
        key_rows, _ = padded_rows([key_starts[i] for i in bucket], [key_lengths[i] for i in bucket], device)
        visible = None
        if not alike:
            before = torch.tensor([key_lengths[i] - lengths[i] for i in bucket], device=device)
            last = before[:, None] + torch.arange(query_rows.shape[1], device=device)
            visible = torch.arange(key_rows.shape[1], device=device) <= last[:, None, :, None]
        grids.append(Grid(query_rows, is_query, key_rows, visible))
    return grids


def padded_rows(starts: list[int], lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns [S, longest] rows start, start + 1, ... of each sequence, and True for its own rows. Padding repeats the
    sequence's last row; any valid row would do, because its results are never read."""
    start, length = (torch.tensor(values, device=device)[:, None] for values in (starts, lengths))
    position = torch.arange(max(lengths), device=device)[None, :]
    return start + torch.minimum(position, length - 1), position < length


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences with `scaled_dot_product_attention`; follows PackedSeqParams (THD).

    With context parallelism each rank has some of the queries and gathers all keys and values; or with `a2a`, gets all
    tokens of some of the heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        *_: Any,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **__: Any,
    ):
        super().__init__()
        self.by_heads = cp_comm_type == "a2a"
        self.softmax_scale = config.softmax_scale if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

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
        """Returns [T, heads * value_dim] from query [T, heads, head_dim], key [T, kv_heads, head_dim] and value."""
        assert packed_seq_params is not None and attention_bias is None
        bounds = packed_seq_params.cu_seqlens_q
        group = sharing(packed_seq_params)
        if self.by_heads and group:
            parts = (tokens_to_heads(tensor, bounds, group) for tensor in (query, key, value))
            return heads_to_tokens(self.attended(*parts, packed_seq_params), bounds, group).flatten(1)
        key, value = (gather_tokens(tensor, bounds, group) for tensor in (key, value))
        return self.attended(query, key, value, packed_seq_params).flatten(1)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams) -> Tensor:
        """Returns [queries, heads, value_dim] of the queries and heads of this rank, which has all keys of the
        heads."""
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        grids = layout_of(packing, whole=self.by_heads).grids
        chosen = getattr(packing, "chosen", {}).get(self) or [grid.visible for grid in grids]
        sinks = self.sinks(packing)
        for (query_rows, is_query, key_rows, _), visible in zip(grids, chosen, strict=True):
            grid_query, grid_key, grid_value = (
                tensor[rows].transpose(1, 2)
                for tensor, rows in ((query, query_rows), (key, key_rows), (value, key_rows))
            )  # [sequence, heads, position, head_dim]
            grid = self.attend(grid_query, grid_key, grid_value, visible, sinks)
            output = output.index_put((query_rows[is_query],), grid.transpose(1, 2)[is_query])
        return output

    def sinks(self, packing: PackedSeqParams) -> Tensor | None:
        """Returns the sinks of the heads that this rank computes. None if the layer has none."""
        group = sharing(packing) if self.by_heads else None
        if self.softmax_offset is None or group is None:
            return self.softmax_offset
        return self.softmax_offset.chunk(group.size())[group.rank()]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Returns [sequence, heads, position, value_dim] of one grid. If `visible` is None, each query attends to
        itself and all before it."""
        if self.window is None and sinks is None:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                is_causal=visible is None,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
        assert visible is None, (
            "checks refuse windows and sinks with shared prompts, and with context parallelism but by heads"
        )
        return masked_attention(query, key, value, scale=self.softmax_scale, window=self.window, sinks=sinks)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the sinks with their position in a distributed checkpoint: tensor parallelism splits them by
        heads."""
        state = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
