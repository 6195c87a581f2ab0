"""Replacements of Megatron's output layer over the vocabulary: C numbers for each token, or the bare states.

All tensor-parallel ranks have the whole head, and under sequence parallelism each applies it to its own tokens. Its
gradient on a rank is then that of those tokens, like a norm's: `sequence_parallel` makes Megatron sum it over the
tensor-parallel ranks and count it once in the gradient's norm.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor

from rlframe.models.config import HEAD


class ValueHead(torch.nn.Module):
    """A head with C outputs for each token, in float32 independent of the model's number format."""

    def __init__(self, config: TransformerConfig, num_outputs: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_outputs, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns [tokens, 1, C], and no bias, from [tokens, 1, H]."""
        return F.linear(states.float(), self.weight.float()), None

    def sharded_state_dict(self, prefix: str, **_: Any) -> dict[str, Any]:
        """Returns its entry in a distributed checkpoint, a replica on every rank.

        It has a name of its own: Megatron, which lets the vocabulary's padding differ, would fill an entry with the
        output layer's name with the first rows of a language model's.
        """
        # Without groups Megatron uses the current ones; given only one of the two, it ignores the other.
        return {f"{prefix}weight": make_sharded_tensor_for_checkpoint(self.weight, HEAD)}


class NoEntry:
    """Stands for the weight that Megatron-Core 0.16.1 marks in every output layer without checking that it exists. It
    is not saved."""


class NoHead(torch.nn.Module):
    """A head that returns the states unchanged."""

    weight = None

    def forward(self, states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns [tokens, 1, H] unchanged, and no bias."""
        return states, None

    def sharded_state_dict(self, prefix: str, **_: Any) -> dict[str, Any]:
        """Returns no entries: see NoEntry."""
        return {f"{prefix}weight": NoEntry()}


def replace_output_layer(module: GPTModel, num_outputs: int | None) -> None:
    """Replaces the output layer, if the module has it, by the head of `Architecture.num_outputs` outputs."""
    if num_outputs is None or not module.post_process:
        return
    module.output_layer = ValueHead(module.config, num_outputs) if num_outputs else NoHead()
