"""What takes the place of Megatron's output layer over the vocabulary: C numbers for each token, or the bare states.

All tensor-parallel ranks have the head whole, and under sequence parallelism each applies it to its own tokens. Its
gradient on a rank is then that of those tokens, like that of a norm: `sequence_parallel` has Megatron sum it over the
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
    """C outputs for each token, in float32 whatever the model's number format."""

    def __init__(self, config: TransformerConfig, num_outputs: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_outputs, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns [tokens, 1, C], and no bias, from [tokens, 1, H]."""
        return F.linear(states.float(), self.weight.float()), None

    def sharded_state_dict(self, prefix: str, **_: Any) -> dict[str, Any]:
        """Its entry in a distributed checkpoint, a replica on every rank.

        Under a name of its own: Megatron, which lets the vocabulary's padding differ, would fill what has the output
        layer's with the first rows of a language model's.
        """
        # Without groups Megatron takes the current ones; given one of the two, it forgets the other.
        return {f"{prefix}weight": make_sharded_tensor_for_checkpoint(self.weight, HEAD)}


class NoEntry:
    """Stands where Megatron-Core 0.16.1 marks an output layer's weight without looking for it; not to be saved."""


class NoHead(torch.nn.Module):
    """The states as they are."""

    weight = None

    def forward(self, states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Returns [tokens, 1, H] as given, and no bias."""
        return states, None

    def sharded_state_dict(self, prefix: str, **_: Any) -> dict[str, Any]:
        """Nothing: see NoEntry."""
        return {f"{prefix}weight": NoEntry()}


def replace_output_layer(module: GPTModel, num_outputs: int | None) -> None:
    """Puts the head of `Architecture.num_outputs` outputs in the place of the output layer, where the module has it."""
    if num_outputs is None or not module.post_process:
        return
    module.output_layer = ValueHead(module.config, num_outputs) if num_outputs else NoHead()
