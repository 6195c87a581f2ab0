"""Tokens on their way to the ranks of their experts and back."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from rlframe.megatron.model.layers.experts.once import OncePerRank


def prepare(models: Sequence[torch.nn.Module], *, send_once: bool) -> None:
    """Makes dispatchers of experts that are all on this rank sort tokens once, and lets others send tokens once.

    Args:
        send_once: whether a token is to be sent once to each rank, and not once for each of its experts there.
    """
    for layer in layers(models):
        dispatcher = layer.token_dispatcher
        if dispatcher.ep_size * dispatcher.tp_size == 1:
            sort_once(dispatcher)
        elif send_once and sends_once(dispatcher):
            groups = ProcessGroupCollection(
                ep=dispatcher.ep_group, expt_tp=dispatcher.tp_group, tp_ep=dispatcher.tp_ep_group
            )
            layer.token_dispatcher = OncePerRank(dispatcher, groups)


def layers(models: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Yields the layers whose tokens go by all-to-all, without room that is kept for more tokens."""
    for layer in (module for model in models for module in model.modules()):
        dispatcher: Any = getattr(layer, "token_dispatcher", None)
        if type(dispatcher) is MoEAlltoAllTokenDispatcher and not dispatcher.drop_and_pad:
            yield layer


def sort_once(dispatcher: MoEAlltoAllTokenDispatcher) -> None:
    """Makes the dispatcher of experts that are all on this rank sort tokens once.

    Megatron-Core (0.16 to 0.19) sorts them by expert, sends them to the experts' ranks, and sorts what came from each
    rank by expert. From one rank they come in order, and the second sort copies each token once for each of its
    experts, there and back, to where it was: 32 of a step's 702 ms of kernels for 12 layers of Qwen3-30B-A3B. Not
    needed any more once `dispatch_postprocess` asks for the number of ranks, too.
    """
    # The number decides about the second sort, and where there is one rank, about nothing else.
    dispatcher.num_local_experts = 1


def sends_once(dispatcher: MoEAlltoAllTokenDispatcher) -> bool:
    """Returns whether `OncePerRank` can take a dispatcher's place. It cannot where several ranks share an expert, where
    numbers of tokens are filled up for FP8, and where shared experts compute meanwhile."""
    is_padded = dispatcher.config.moe_router_padding_for_quantization
    return dispatcher.tp_size == 1 and not is_padded and dispatcher.shared_experts is None
