"""The frozen reference: a second set of weights for the policy's own module, not a second model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlframe.megatron.model import Model

CHUNK_ELEMENTS = 1 << 24
"""Elements exchanged at once: the extra device memory of a swap is this much, whatever the model's size."""


class ReferenceWeights:
    """A copy of weights in host memory that changes places with the policy's for the length of a `with` block."""

    def __init__(self, weights: Sequence[Tensor]):
        """Keep a copy of what `weights`, contiguous memory of the model, hold now."""
        self.live = [tensor.view(-1) for tensor in weights]
        self.kept = [buffer.detach().to("cpu", copy=True) for buffer in self.live]
        if self.live and self.live[0].device.type == "cuda":
            self.kept = [buffer.pin_memory() for buffer in self.kept]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model computes with the reference weights inside the block, and has its own, bit for bit, after it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, kept in zip(self.live, self.kept, strict=True):
            for here, there in zip(live.split(CHUNK_ELEMENTS), kept.split(CHUNK_ELEMENTS), strict=True):
                carried = here.clone()
                here.copy_(there)
                there.copy_(carried)


def parameter_buffers(model: Model) -> list[Tensor]:
    """The flat buffers, each [n], that all parameters of the model are views of."""
    return [buffer.param_data for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
