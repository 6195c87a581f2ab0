"""Routes at random, and transformers' routers made to follow them: what replayed gradients are compared with."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

ROUTES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "routes_of_the_next_token": lambda routes: routes.roll(-1, 0),
    "no_routes": lambda routes: None,
}
"""What is made of the routes of a micro-batch by mutations of the gradient matrix."""


def force_routes(model: Any, routes: Tensor | None) -> None:
    """Has the routers of transformers' model choose `routes` [L, layers, k], the last token's too; None lets them."""
    routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    for place, router in enumerate(routers):
        router.forward = type(router).forward.__get__(router)
        if routes is not None:
            router.forward = partial(forced, router, routes[:, place].long())


def forced(router: Any, chosen: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As Qwen3MoeTopKRouter: scores of all experts, weights of the chosen, which add up to 1, and who they are."""
    logits = torch.nn.functional.linear(states.reshape(-1, router.hidden_dim), router.weight)
    weights = logits.softmax(-1).gather(1, chosen)
    return logits, weights / weights.sum(1, keepdim=True), chosen


def make_routes(model: Any, num_tokens: int) -> Tensor:
    """[num_tokens, layers, k] different experts for each token and layer, at random."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    layers = config.num_hidden_layers - len(config.mlp_only_layers)
    order = torch.rand(num_tokens, layers, config.num_experts, generator=generator)
    return order.topk(config.num_experts_per_tok).indices.to(torch.uint8)
