"""Routed experts: which experts each token went to while an engine sampled, so that a trainer can route it the same
way.

arXiv 2510.11370 calls the method rollout routing replay (R3).
"""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from rlframe.models.families.base import Architecture
from rlframe.utils.errors import RlframeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Routers:
    """The routers of a model, as engines number them."""

    num_layers: int
    """Number of all layers of the model. Engines return routes for all of them."""
    layers: tuple[int, ...]
    """Indices of the layers that have experts. `Completion.routes` holds these only."""
    experts_per_token: int
    num_experts: int

    @classmethod
    def of(cls, architecture: Architecture) -> "Routers":
        """Returns the routers of a model with this architecture."""
        return cls(
            num_layers=architecture.num_layers,
            layers=tuple(index for index, sparse in enumerate(architecture.moe_layers) if sparse),
            experts_per_token=architecture.experts_per_token,
            num_experts=architecture.num_experts,
        )

    @property
    def dtype(self) -> type[np.integer]:
        """The smallest integer type that holds an expert's index. One byte suffices for up to 256 experts: 384 bytes a
        token for the 48 layers with 8 experts per token of Qwen3-30B-A3B."""
        return np.uint8 if self.num_experts <= 256 else np.int16

    def routes(self, found: Any, *, num_tokens: int, engine: str) -> Shaped[np.ndarray, "rows layers k"]:
        """Returns [num_tokens - 1, layers, k], the layout of `Completion.routes`, from an engine's output for all
        layers.

        Args:
            found: integers in the order [rows, all layers, k], or None.
            num_tokens: number of tokens of prompt and response.
            engine: name of the engine, for messages.

        Raises:
            RlframeError: `found` has another size, or names an expert twice although k different ones were chosen.
        """
        shape = (num_tokens - 1, self.num_layers, self.experts_per_token)
        if found is None or found.size != np.prod(shape):
            got = "nothing" if found is None else f"{found.size} numbers"
            raise RlframeError(
                f"{engine} must return routed experts of shape {shape} for {num_tokens - 1} tokens, got {got}"
            )
        routes = found.reshape(shape)[:, self.layers].astype(self.dtype)
        # Engines that do not record routes return 0 everywhere (vLLM 0.26 on a CPU). Looking at both ends suffices to
        # detect it.
        for row in routes[[0, -1]].reshape(-1, self.experts_per_token).tolist():
            if len(set(row)) < len(row) or max(row) >= self.num_experts:
                raise RlframeError(
                    f"{engine} returned {row} as the experts of one token, expected "
                    f"{self.experts_per_token} different ones below {self.num_experts}"
                )
        return routes


class Chosen(threading.local):
    """The experts of a thread's last forward pass: others may compute with the same model meanwhile."""

    def __init__(self, num_layers: int):
        """Begins anew in each thread."""
        self.layers: list[Tensor | None] = [None] * num_layers


class RouteRecorder:
    """Notes which experts the routers of a transformers model choose."""

    def __init__(self, model: torch.nn.Module, routers: Routers):
        """Registers hooks on the expert modules `...mlp.experts`, which are called with (states, chosen experts,
        weights)."""
        self.routers = routers
        self.dtype = torch.uint8 if routers.dtype is np.uint8 else torch.int16
        modules = [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]
        assert len(modules) == len(routers.layers), "one module of experts for each layer that has some"
        self._chosen = Chosen(len(modules))
        for place, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._note, place))

    def _note(self, place: int, module: Any, arguments: tuple) -> None:
        self._chosen.layers[place] = arguments[1]

    def last(self) -> Int[Tensor, "N layers k"]:
        """Returns [N, layers, k], the experts of each token of this thread's last forward pass, padding included."""
        chosen = [each for each in self._chosen.layers if each is not None]
        assert len(chosen) == len(self._chosen.layers), "a forward pass came before"
        return torch.stack(chosen, dim=1).to(self.dtype)
