"""Steps of some families between the projections and the softmax, around Megatron's own core attention."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlframe.megatron.packed.context_parallel import place_in, positions_of_rank, sharing
from rlframe.models.families.base import Architecture, QueryScaling


def adjusted(architecture: Architecture, core: Any) -> Any:
    """Returns what builds the core attention of a layer: `core` itself for an architecture that changes nothing."""
    if architecture.query_scaling is None and not architecture.chunk_layers:
        return core
    return partial(AdjustedAttention, architecture=architecture, core=core)


class AdjustedAttention(torch.nn.Module):
    """A core attention whose queries are scaled by their position, or see only their chunk of the sequence."""

    def __init__(
        self, *, architecture: Architecture, core: Any, config: TransformerConfig, layer_number: int, **options: Any
    ):
        super().__init__()
        self.core = core(config=config, layer_number=layer_number, **options)
        without_rope = architecture.no_rope_layers
        scaled = without_rope[layer_number - 1] if without_rope else True
        self.scaling = architecture.query_scaling if scaled else None
        chunks = architecture.chunk_layers
        self.chunk = architecture.attention_chunk if chunks and chunks[layer_number - 1] else 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns [T, heads * value_dim] from query [T, heads, head_dim], key [T, kv_heads, head_dim] and value."""
        assert packed_seq_params is not None
        if self.scaling is not None:
            place = place_in(sharing(packed_seq_params))
            positions = positions_of_rank(packed_seq_params.cu_seqlens_q, *place, len(query))
            query = query * query_factors(self.scaling, positions)[:, None, None].to(query.dtype)
        if self.chunk:
            packed_seq_params = chunks_of(packed_seq_params, self.chunk)
        return self.core(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the entries of the core attention in a distributed checkpoint."""
        return self.core.sharded_state_dict(f"{prefix}core.", sharded_offsets, metadata)


def chunks_of(packing: PackedSeqParams, size: int) -> PackedSeqParams:
    """Returns bounds of the chunks of all sequences, as if each were a sequence of its own. Positions are applied
    before, and count from the beginning of the sequence."""
    if packing.max_seqlen_q <= size:
        return packing
    if not hasattr(packing, "chunks"):
        packing.chunks = {}
    # Computed once for all layers of a model. A teacher may have chunks of another size.
    if size not in packing.chunks:
        bounds = packing.cu_seqlens_q.tolist()
        starts = [row for first, end in pairwise(bounds) for row in range(first, end, size)]
        cut = packing.cu_seqlens_q.new_tensor([*starts, bounds[-1]])
        packing.chunks[size] = replace(
            packing, cu_seqlens_q=cut, cu_seqlens_kv=cut, max_seqlen_q=size, max_seqlen_kv=size
        )
    return packing.chunks[size]


def query_factors(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Returns [T] float32, the factor of a query at each position."""
    return 1.0 + scaling.strength * torch.log1p(torch.floor((positions.float() + scaling.shift) / scaling.tokens))
