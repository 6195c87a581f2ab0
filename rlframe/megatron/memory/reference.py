"""The reference: a second set of weights for the policy's module, instead of a second model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlframe.megatron.memory.pinned import copied

CHUNK_ELEMENTS = 1 << 24
"""Number of elements exchanged at once. The extra device memory of a swap is PARTS times this much, independent of the
model's size."""
PARTS = 2
"""Parts of a GPU's weights that are on their way at once: while one leaves, the next arrives."""


class ReferenceWeights:
    """A copy of weights in host memory that is exchanged with the policy's inside a `with` block."""

    def __init__(self, weights: Sequence[Tensor], *, follows: bool = False):
        """Copies the present content of `weights`, contiguous memory of the model.

        Args:
            follows: whether to keep float32 values for `follow`, without which changes below the resolution of the
                weights' dtype would be lost each time. Float32 weights need no further copy.
        """
        self.live = [tensor.view(-1) for tensor in weights]
        self.kept = [copied(buffer) for buffer in self.live]
        self.exact = [buffer.float() for buffer in self.kept] if follows else []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the model compute with the reference weights inside the block. Afterwards it has its own again, bit for
        bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """Changes the reference to mix * the model's weights + (1 - mix) * itself. Every rank changes its own part."""
        for live, exact in zip(self.live, self.exact, strict=True):
            for here, there in zip(live.split(CHUNK_ELEMENTS), exact.split(CHUNK_ELEMENTS), strict=True):
                there.mul_(1 - mix).add_(here.to("cpu", torch.float32), alpha=mix)
        self.round()

    def round(self) -> None:
        """Rounds the float32 values to the weights' dtype and stores them in the copy."""
        for kept, exact in zip(self.kept, self.exact, strict=True):
            if kept.data_ptr() != exact.data_ptr():
                kept.copy_(exact)

    def exact_of(self, weight: Tensor) -> Tensor | None:
        """Returns the float32 values of `weight`, contiguous memory of the model, as a view of its shape. None if none
        of the tensors given at the start holds it."""
        for live, exact in zip(self.live, self.exact, strict=True):
            first, odd = divmod(weight.data_ptr() - live.data_ptr(), live.element_size())
            if not odd and 0 <= first and first + weight.numel() <= live.numel():
                return exact[first : first + weight.numel()].view(weight.shape)
        return None

    @torch.no_grad()
    def _exchange(self) -> None:
        pairs = [
            part
            for live, kept in zip(self.live, self.kept, strict=True)
            for part in zip(live.split(CHUNK_ELEMENTS), kept.split(CHUNK_ELEMENTS), strict=True)
        ]
        if pairs and pairs[0][0].is_cuda:
            exchange_both_ways(pairs)
            return
        for here, there in pairs:
            carried = here.clone()
            here.copy_(there)
            there.copy_(carried)


def exchange_both_ways(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies parts on a GPU into parts in pinned host memory, and these into those. A link carries as much in either
    direction, whatever goes in the other. Returns when the host has its parts."""
    arriving, leaving = torch.cuda.Stream(), torch.cuda.Stream()
    arriving.wait_stream(torch.cuda.current_stream())
    longest = max(here.nbytes for here, _ in pairs)
    buffers = [torch.empty(longest, dtype=torch.uint8, device=pairs[0][0].device) for _ in range(PARTS)]
    left: list[torch.cuda.Event] = []
    for index, (here, there) in enumerate(pairs):
        buffer = buffers[index % PARTS][: here.nbytes].view(here.dtype)
        with torch.cuda.stream(arriving):
            if index >= PARTS:
                arriving.wait_event(left[index - PARTS])
            buffer.copy_(here)
            here.copy_(there, non_blocking=True)
            arrived = arriving.record_event()
        with torch.cuda.stream(leaving):
            leaving.wait_event(arrived)
            there.copy_(buffer, non_blocking=True)
            left.append(leaving.record_event())
    torch.cuda.current_stream().wait_stream(arriving)
    leaving.synchronize()
