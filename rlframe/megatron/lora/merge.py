"""The model's weights with merged adapters, for engines and exports, and the model without adapters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlframe.megatron.lora.adapters import Lora
from rlframe.megatron.memory.reference import ReferenceWeights


class MergedWeights:
    """W + scaling B A of every adapted weight, in memory of its own, next to the base, which is only read.

    Engines read that memory asynchronously while training continues from the base. With a single copy each would have
    to wait for the other, and subtracting the product again would not restore the base's bits. It costs as many bytes
    as the adapted weights (2 per element in bfloat16), which is less than the gradients (4) and optimizer state (12) of
    training them, and temporarily two float32 copies of the largest one.
    """

    def __init__(self, lora: Lora, parameters: Mapping[str, Tensor]):
        """Allocates the memory; `update` fills it.

        Args:
            parameters: the model's parameters, by canonical name.
        """
        self.lora, self.base = lora, parameters
        self.parameters = {
            name: torch.empty_like(value) if name in lora.adapters else value for name, value in parameters.items()
        }
        """All parameters of the model by canonical name: merged if there is an adapter, else those in use."""

    @torch.no_grad()
    def update(self) -> None:
        """Merges the present adapters."""
        for name, adapter in self.lora.adapters.items():
            self.parameters[name].copy_(adapter.merged(self.base[name]))


class WithoutAdapters:
    """The frozen reference of a model with adapters: the model without them, with a copy of the tensors trained in
    full."""

    def __init__(self, lora: Lora):
        """Copies the tensors that will be trained in full, before training."""
        self.lora = lora
        self.kept = ReferenceWeights([parameter.detach() for parameter in lora.saved.values()])

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the model compute as the base inside the block."""
        with self.lora.disabled(), self.kept.active():
            yield
