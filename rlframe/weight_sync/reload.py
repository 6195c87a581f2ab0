"""Reloads: whole tensors through staging memory and the engine's own loader, for engines that repack their weights.

A reload is not a transport of its own. The staging memory of each bucket has an identity layout, which the same planner
fills by any of the transports.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Box, matrix_shape
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter
from rlframe.weight_sync.proof.digest import DigestPlan
from rlframe.weight_sync.transports.base import Link, Transport

Shapes = Mapping[str, tuple[int, ...]]
ALIGNMENT = 16
"""Alignment in bytes of tensors in staging memory."""


def bucket(part: int) -> str:
    """Returns the name of the staging parameter of a part."""
    return f"bucket {part}"


def make_buckets(tensors: Shapes, dtype: torch.dtype, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Returns the tensors in checkpoint order, in buckets of at most `bucket_bytes`. A larger tensor has a bucket of
    its own."""
    buckets: list[list[str]] = []
    used = 0
    for name, shape in tensors.items():
        size = _elements(shape, dtype) * dtype.itemsize
        if not buckets or used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(name)
        used += size
    return tuple(map(tuple, buckets))


def staging_layout(buckets: Sequence[Sequence[str]], tensors: Shapes, dtype: torch.dtype) -> MemoryLayout:
    """Returns the layout of whole tensors in staging memory: parameter `bucket(k)` holds those of part k in order."""
    boxes, parameters = {}, {}
    for part, names in enumerate(buckets):
        offset = 0
        for name in names:
            rows, cols = matrix_shape(tensors[name])
            boxes[name] = (Box(name, 0, rows, 0, cols, bucket(part), offset, cols, 1),)
            offset += _elements(tensors[name], dtype)
        parameters[bucket(part)] = Parameter((offset,), dtype)
    return MemoryLayout(boxes=boxes, tensors=dict(tensors), parameters=parameters)


def _elements(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the number of elements that a tensor takes in staging memory."""
    rows, cols = matrix_shape(shape)
    unit = ALIGNMENT // dtype.itemsize
    return -(-rows * cols // unit) * unit


class _Loader(Protocol):
    """Interface of `endpoints.Reload`."""

    def begin(self) -> None: ...
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None: ...
    def finish(self) -> None: ...


class Staging:
    """The staging memory of one engine rank, which every bucket uses in turn."""

    def __init__(
        self,
        link: Link,
        tensors: Shapes,
        dtype: torch.dtype,
        device: torch.device,
        loader: _Loader,
    ):
        """Allocates the memory of the largest bucket."""
        buckets = link.buckets
        self._buckets, self._tensors, self._loader = buckets, tensors, loader
        layout = staging_layout(buckets, tensors, dtype)
        sizes = [layout.parameters[bucket(part)].shape[0] for part in range(len(buckets))]
        memory = torch.zeros(max(sizes, default=0), dtype=dtype, device=device)
        self.parameters = {bucket(part): memory[:size] for part, size in enumerate(sizes)}
        """The parameters that the copies write to."""
        self._boxes = layout.boxes
        self._digests = [
            DigestPlan(layout, self.parameters, names=names, units=link.units, seed=link.seed) for names in buckets
        ]
        self._held: NDArray[np.uint64] | None = None

    def receive(self, transport: Transport) -> tuple[NDArray[np.uint64], float]:
        """Returns (digests of all tensors as they were passed to the loader, seconds of computing them)."""
        self._held = None
        held = np.zeros(len(self._tensors), dtype=np.uint64)
        verify_s = 0.0
        self._loader.begin()
        for part, names in enumerate(self._buckets):
            transport.pull(part)
            start = time.perf_counter()
            held += self._digests[part].shares()
            verify_s += time.perf_counter() - start
            # Clones: engines keep references until they have all parts of a module, and staging is overwritten.
            self._loader.load([(name, self._whole(name).clone()) for name in names])
        self._loader.finish()
        self._held = held
        return held, verify_s

    def digests(self) -> NDArray[np.uint64]:
        """Returns the digests of the tensors that the loader got last.

        Raises:
            WeightSyncFailed: the last reload was interrupted, or there was none.
        """
        if self._held is None:
            raise WeightSyncFailed("the engine has not received a whole version: its weights are between two versions")
        return self._held

    def _whole(self, name: str) -> Tensor:
        return self._boxes[name][0].view(self.parameters).view(self._tensors[name])
