"""The data that a rank has to write, live or copied to host memory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from rlframe.megatron.memory.pinned import PIECE_BYTES, Pieces, host_memory

ALIGNMENT_BYTES = 64


@dataclass(kw_only=True)
class Staged:
    """The data that one rank has to write. `stage_on_host` makes it independent of the live training state."""

    folder: Path
    rank: int
    """Index of the rank."""
    items: list[tuple[WriteItem, Any]]
    """Tensors on any device, or `io.BytesIO` for other objects."""
    metadata: Metadata | None
    """Pieces on all ranks. On rank 0 only."""
    fetch: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Called with each tensor when it is written, so that it can be computed from something else."""

    def stage_on_host(self, memory: "HostMemory") -> None:
        """Copies every tensor to `memory`. The originals may change afterwards."""
        memory.begin()
        self.items = [(item, memory.copy(value) if isinstance(value, Tensor) else value) for item, value in self.items]
        if memory.pinned:
            torch.cuda.synchronize()


class HostMemory:
    """Host memory for the copy of a training state, which stays from one checkpoint to the next: to pin 20 GB takes
    longer than to fill them."""

    def __init__(self, device: torch.device):
        """
        Args:
            device: of the training state. Memory for that of a GPU is pinned.
        """
        self.pinned = device.type == "cuda"
        self._slabs: list[Tensor] = []
        self._index = self._used = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Number of bytes that it has."""
        return sum(slab.nbytes for slab in self._slabs)

    def reserve(self, num_bytes: int) -> None:
        """Grows to at least this many bytes. May run in another thread than copies, which then wait for it."""
        with self._lock:
            pieces = Pieces(pinned=self.pinned)
            pieces.grow(num_bytes - self.num_bytes)
            self._slabs += pieces.all()

    def begin(self) -> None:
        """Makes all of it free again."""
        with self._lock:
            self._index = self._used = 0

    def copy(self, value: Tensor) -> Tensor:
        """Returns a copy of `value`, complete once the device has been synchronized."""
        value = value.detach()
        with self._lock:
            place = self._place(value.nbytes).view(value.dtype).view(value.shape)
        return place.copy_(value, non_blocking=True)

    def _place(self, num_bytes: int) -> Tensor:
        """Returns free memory: in the present slab, in one after it, or in another one."""
        first = -(-self._used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        while self._index < len(self._slabs) and first + num_bytes > self._slabs[self._index].nbytes:
            self._index, first = self._index + 1, 0
        if self._index == len(self._slabs):
            self._add(max(PIECE_BYTES, num_bytes))
        self._used = first + num_bytes
        return self._slabs[self._index][first : self._used]

    def _add(self, num_bytes: int) -> None:
        self._slabs.append(host_memory(num_bytes, pinned=self.pinned))
