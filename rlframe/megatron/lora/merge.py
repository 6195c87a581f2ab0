"""The model's weights with the adapters worked in, as engines and exports see them; and the model without adapters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlframe.megatron.lora.adapters import Lora
from rlframe.megatron.memory.reference import ReferenceWeights


class MergedWeights:
    """W + scaling B A of every adapted weight, in memory of its own beside the base, which is only ever read.

    Engines read that memory at times of their own choosing, and training goes on from the base: with one copy for both,
    each would have to wait for the other, and taking the product away again would not give back the base's bits. The
    price is as many bytes as the adapted weights have (2 per element in bfloat16), less than the gradients (4) and
    optimizer state (12) that training them would take; and for a moment two float32 copies of the largest one.
    """

    def __init__(self, lora: Lora, parameters: Mapping[str, Tensor]):
        """Takes the memory; `update` fills it.

        Args:
            parameters: the model's, by canonical name.
        """
        self.lora, self.base = lora, parameters
        self.parameters = {
            name: torch.empty_like(value) if name in lora.adapters else value for name, value in parameters.items()
        }
        """All parameters of the model by canonical name: merged where there is an adapter, else those in use."""

    @torch.no_grad()
    def update(self) -> None:
        """Work in the adapters as they are now."""
        for name, adapter in self.lora.adapters.items():
            self.parameters[name].copy_(adapter.merged(self.base[name]))


class WithoutAdapters:
    """The frozen reference of a model with adapters: the same without them; what is trained in full has a copy."""

    def __init__(self, lora: Lora):
        """Keeps a copy of what will be trained in full, before it is."""
        self.lora = lora
        self.kept = ReferenceWeights([parameter.detach() for parameter in lora.saved.values()])

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model computes as the base inside the block."""
        with self.lora.disabled(), self.kept.active():
            yield
