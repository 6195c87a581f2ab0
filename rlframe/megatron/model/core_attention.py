"""What some families do to queries between the projections and the softmax, around Megatron's own core attention."""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlframe.megatron.packed.context_parallel import positions_of_rank
from rlframe.models.families.base import Architecture, QueryScaling


def adjusted(architecture: Architecture, core: Any) -> Any:
    """Returns what builds the core attention of a layer: `core` itself for an architecture that changes nothing."""
    if architecture.query_scaling is None:
        return core
    return partial(AdjustedAttention, architecture=architecture, core=core)


class AdjustedAttention(torch.nn.Module):
    """A core attention whose queries are scaled by their position."""

    def __init__(
        self, *, architecture: Architecture, core: Any, config: TransformerConfig, layer_number: int, **options: Any
    ):
        super().__init__()
        self.core = core(config=config, layer_number=layer_number, **options)
        without_rope = architecture.no_rope_layers
        scaled = without_rope[layer_number - 1] if without_rope else True
        self.scaling = architecture.query_scaling if scaled else None

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
            group = parallel_state.get_context_parallel_group()
            positions = positions_of_rank(packed_seq_params.cu_seqlens_q, group.size(), group.rank())
            query = query * query_factors(self.scaling, positions)[:, None, None].to(query.dtype)
        return self.core(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **options)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the entries of the core attention in a distributed checkpoint."""
        return self.core.sharded_state_dict(f"{prefix}core.", sharded_offsets, metadata)


def query_factors(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Returns [T] float32, the factor of a query at each position."""
    return 1.0 + scaling.strength * torch.log1p(torch.floor((positions.float() + scaling.shift) / scaling.tokens))
