"""Modules in Megatron's layers that only some families need."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlframe.models.families.base import ClampedGlu


class WholeLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank applies whole to its part of the tokens.

    Transformer Engine replicates MLA's down-projections; Megatron-Core 0.16.1's local layers shard them. Here they are
    always replicated, so that families load into one layout. `platform` puts this class in Transformer Engine's place,
    because MLASelfAttention accepts no other class.
    """

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        config.init_method(self.weight)
        # This mark makes Megatron add up the gradients of ranks that each saw a slice of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Returns [..., outputs] and no bias, as Megatron's linear layers do."""
        return F.linear(hidden, self.weight), None


class ExpertOutput(RowParallelLinear):
    """The second matrix of an expert with a bias, which tensor parallelism does not split.

    Workaround for Megatron-Core 0.16.1: without EP and TP it passes the product through the sum over one rank, and then
    adds the bias in place to the result of that autograd function, which torch refuses. Here nothing is summed. Not
    needed any more once GPT-OSS trains on a CPU without it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True


def clamped_glu(glu: ClampedGlu) -> type[torch.nn.Module]:
    """Returns the activation as a module that Megatron can build."""

    class Activation(torch.nn.Module):
        """Source: GPT-OSS's reference (openai/gpt-oss, gpt_oss/torch/model.py, swiglu)."""

        def __init__(self, config: TransformerConfig):
            super().__init__()

        def forward(self, both: Tensor) -> Tensor:
            """Returns [..., F] from [..., 2 F], in which gate and up alternate."""
            gate = both[..., ::2].clamp(max=glu.limit)
            up = both[..., 1::2].clamp(min=-glu.limit, max=glu.limit)
            return (up + 1) * gate * torch.sigmoid(glu.alpha * gate)

        def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            """Returns nothing: Megatron asks every part of an MLP for its entries of a checkpoint."""
            return {}

    return Activation
