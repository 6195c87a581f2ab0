"""Self-attention whose norms of heads and rotary positions are one kernel, on a GPU."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rlframe.megatron.packed.context_parallel import place_in, positions_of_rank, sharing
from rlframe.models.families.base import Architecture

LARGEST_HEAD = 256
"""Dimension of the largest head whose row fits the registers of a program."""


def turns_whole_heads(architecture: Architecture, *, tp: int) -> bool:
    """Returns whether queries and keys of all layers are what `QueryKeyAttention` computes: rotary positions of one
    kind over whole heads, after a norm of each head or none.

    Args:
        tp: number of tensor-parallel ranks. With fewer key heads than ranks Megatron gathers them first.
    """
    scaling = architecture.rope_scaling or {}
    positions = not (
        architecture.rotary_percent != 1.0
        or architecture.rope_interleaved
        or architecture.window_rope_theta is not None
        or architecture.no_rope_layers
        or scaling.get("rope_type") == "yarn"
    )
    heads = not (
        architecture.latent is not None
        or architecture.gated_delta_net is not None
        or architecture.output_gate
        or architecture.qk_l2_norm
        or architecture.whole_qk_norm
        or (architecture.qk_norm and architecture.zero_centered_norms)
        or architecture.num_kv_heads < tp
    )
    size = architecture.head_dim
    return positions and heads and size <= LARGEST_HEAD and not size & (size - 1)


class QueryKeyAttention(SelfAttention):
    """Megatron's self-attention. Its queries and keys get their norms and positions where they leave the projection, in
    one pass over memory. Megatron reads and writes them for each of these, and for the copies between."""

    packed: tuple[Tensor, PackedSeqParams]
    """Angles and bounds of the micro-batch that passes."""

    def forward(
        self,
        *arguments: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """Returns the attention's output and its bias."""
        assert rotary_pos_emb is not None and packed_seq_params is not None, "every micro-batch is packed"
        self.packed = rotary_pos_emb, packed_seq_params
        try:
            # Without angles Megatron does not turn them again.
            return super().forward(*arguments, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **options)
        finally:
            # Otherwise the micro-batch's tensors would stay until the layer's next pass.
            del self.packed

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Returns queries [T, 1, query heads, D], keys and values [T, 1, key heads, D]."""
        mixed, _ = self.linear_qkv(hidden_states)
        # Called, the norms give their weights after what hangs on the call, such as the end of a gather.
        weights = (None, None) if self.q_layernorm is None else (self.q_layernorm(None), self.k_layernorm(None))
        keys = self.num_query_groups_per_partition
        sizes = (keys, self.num_attention_heads_per_partition // keys, self.hidden_size_per_attention_head)
        turns = turns_of(*self.packed, len(mixed))
        return TurnedHeads.apply(mixed, *weights, turns, sizes, self.config.layernorm_epsilon)


class TurnedHeads(torch.autograd.Function):
    """Queries, keys and values out of the projection's output, turned to their positions after the norms of heads."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        turns: tuple[Tensor, Tensor],
        sizes: tuple[int, int, int],
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [T, 1, keys * group, D], keys and values [T, 1, keys, D].

        Args:
            mixed: [T, 1, keys * (group + 2) * D].
            q_weight: [D] of the norm of query heads. None if there is none.
            k_weight: the same of key heads.
            turns: [T, D / 2] cosine and sine.
            sizes: keys, group and D.
        """
        from rlframe.megatron.model.layers import query_key_kernels  # noqa: PLC0415 - needs Triton

        heads = query_key_kernels.Heads(*sizes)
        weights = None if q_weight is None or k_weight is None else (q_weight, k_weight)
        ctx.save_for_backward(mixed, *(weights or ()))
        ctx.turns, ctx.heads, ctx.epsilon = turns, heads, epsilon
        return query_key_kernels.forward(mixed, weights, turns, heads, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the projection's output and of the weights."""
        from rlframe.megatron.model.layers import query_key_kernels  # noqa: PLC0415 - needs Triton

        mixed, *weights = ctx.saved_tensors
        norms = (weights[0], weights[1]) if weights else None
        out, of_norms = query_key_kernels.backward(grads, mixed, norms, ctx.turns, ctx.heads, ctx.epsilon)
        if of_norms is None:
            return out, None, None, None, None, None
        of_queries, of_keys = of_norms.to(weights[0].dtype)
        return out, of_queries, of_keys, None, None, None


def turns_of(angles: Tensor, packing: PackedSeqParams, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Returns [T, D / 2] float32 cosine and sine of the angles of this rank's tokens, computed once for a micro-batch
    and a model: a teacher that sees the same micro-batch has angles of its own.

    Args:
        angles: [P, 1, 1, D] angles of each position. Both halves of D are equal.
        packing: bounds of the sequences.
        num_tokens: T.
    """
    known = packing.__dict__.setdefault("turns", {})
    # By address, as recomputation brings the same angles in another tensor.
    key = angles.data_ptr(), angles.shape
    if key not in known:
        positions = positions_of_rank(packing.cu_seqlens_q, *place_in(sharing(packing)), num_tokens)
        half = angles.flatten(1).chunk(2, -1)[0].float()[positions]
        # With the angles themselves, so that their address is not given to others.
        known[key] = half.cos(), half.sin(), angles
    return known[key][:2]
