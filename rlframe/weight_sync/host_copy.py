"""HostCopy: a rank's copy of its weights in host memory, which other processes of the host can map."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlframe.weight_sync.border import Held
from rlframe.weight_sync.transports.shm import SharedMemoryHandle, allocate, share

ALIGNMENT = 64
"""Bytes at whose multiples parameters begin."""


class HostCopy:
    """Copies of some parameters. Training changes the parameters, and never the copies."""

    def __init__(self, parameters: Mapping[str, Tensor], names: Sequence[str]):
        """Allocates the memory. `update` fills it."""
        self.names = tuple(names)
        self._originals = [parameters[name] for name in self.names]
        begins, self._num_bytes = [], 0
        for original in self._originals:
            begins.append(self._num_bytes)
            self._num_bytes += -(-span(original) * original.itemsize // ALIGNMENT) * ALIGNMENT
        storage = allocate(self._num_bytes) if self._num_bytes else torch.UntypedStorage(0)
        self._copies = [
            torch.empty(0, dtype=original.dtype).set_(
                storage, begin // original.itemsize, original.shape, original.stride()
            )
            for begin, original in zip(begins, self._originals, strict=True)
        ]
        self._memory: SharedMemoryHandle = share(dict(zip(self.names, self._copies, strict=True)))

    @torch.no_grad()
    def update(self) -> Held:
        """Copies the present weights. They are all there when it returns."""
        start = time.perf_counter()
        for copy, original in zip(self._copies, self._originals, strict=True):
            copy.copy_(original)
        return Held(memory=self._memory, num_bytes=self._num_bytes, seconds=time.perf_counter() - start)


def span(value: Tensor) -> int:
    """Returns the number of elements from a tensor's first to its last in memory."""
    steps = ((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return 1 + sum(steps) if value.numel() else 0
