"""Tokens on their way to experts that are all on one rank."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def sort_once(models: Sequence[torch.nn.Module]) -> None:
    """Makes dispatchers of experts that are all on this rank sort tokens once.

    Megatron-Core (0.16 to 0.19) sorts them by expert, sends them to the experts' ranks, and sorts what came from each
    rank by expert. From one rank they come in order, and the second sort copies each token once for each of its
    experts, there and back, to where it was: 32 of a step's 702 ms of kernels for 12 layers of Qwen3-30B-A3B. Not
    needed any more once `dispatch_postprocess` asks for the number of ranks, too.
    """
    for module in (module for model in models for module in model.modules()):
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if is_alone(dispatcher):
            # The number decides about the second sort, and where there is one rank and no room is kept for more
            # tokens, about nothing else.
            dispatcher.num_local_experts = 1


def is_alone(dispatcher: Any) -> bool:
    """Returns whether a dispatcher sends tokens to this rank alone."""
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.ep_size * dispatcher.tp_size == 1
        and not dispatcher.drop_and_pad
    )
