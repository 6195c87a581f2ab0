"""Norms of queries and of keys over all heads of a token together, whichever ranks hold the heads."""

from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class WholeNorm(torch.nn.Module):
    """Root-mean-square normalisation over heads and head dimensions.

    Megatron-Core has norms of single heads only. Each rank has the weights of its own heads, and the ranks of tensor
    parallelism add up their sums of squares. Computed in float32 and rounded before the weight, as in transformers.
    """

    heads: ClassVar[str]
    """Megatron's field with the number of heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.width = getattr(config, self.heads) * hidden_size
        own = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        """Returns [..., heads of this rank, head dim] normalised over all heads."""
        rows = heads.flatten(-2).float()
        squares = rows.square().sum(-1, keepdim=True)
        # Forward adds over the ranks once, and backward adds the gradients of the sum once.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normalized = rows * torch.rsqrt(squares / self.width + self.eps)
        return (normalized.to(heads.dtype) * self.weight).view_as(heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the weights with their position in a distributed checkpoint: tensor parallelism splits them by
        heads."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


class QueryNorm(WholeNorm):
    """The norm of the queries."""

    heads = "num_attention_heads"


class KeyNorm(WholeNorm):
    """The norm of the keys."""

    heads = "num_query_groups"
