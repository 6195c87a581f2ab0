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


Formats = Mapping[str, torch.dtype]


def bucket(part: int, dtype: torch.dtype) -> str:
    """Returns the name of the staging parameter of those tensors of a part that have this number format."""
    return f"bucket {part} {str(dtype).removeprefix('torch.')}"


def part_of(parameter: str) -> int:
    """Returns the part of a staging parameter."""
    return int(parameter.split()[1])


def finer(formats: Formats, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns those of the number formats that have more digits than `dtype`."""
    return {name: each for name, each in formats.items() if each.is_floating_point and each.itemsize > dtype.itemsize}


def make_buckets(tensors: Shapes, formats: Formats, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
    """Returns the tensors in checkpoint order, in buckets of at most `bucket_bytes`. A larger tensor has a bucket of
    its own."""
    buckets: list[list[str]] = []
    used = 0
    for name, shape in tensors.items():
        size = _elements(shape, formats[name]) * formats[name].itemsize
        if not buckets or used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(name)
        used += size
    return tuple(map(tuple, buckets))


def staging_layout(buckets: Sequence[Sequence[str]], tensors: Shapes, formats: Formats) -> MemoryLayout:
    """Returns the layout of whole tensors in staging memory: parameter `bucket(k, dtype)` holds those of part k that
    have this format, in order."""
    boxes: dict[str, tuple[Box, ...]] = {}
    parameters: dict[str, Parameter] = {}
    for part, names in enumerate(buckets):
        for name in names:
            dtype, (rows, cols) = formats[name], matrix_shape(tensors[name])
            held = bucket(part, dtype)
            offset = parameters[held].shape[0] if held in parameters else 0
            boxes[name] = (Box(name, 0, rows, 0, cols, held, offset, cols, 1),)
            parameters[held] = Parameter((offset + _elements(tensors[name], dtype),), dtype)
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
        device: torch.device,
        loader: _Loader,
    ):
        """Allocates the memory of the largest bucket."""
        buckets = link.buckets
        self._buckets, self._tensors, self._loader = buckets, tensors, loader
        layout = staging_layout(buckets, tensors, link.dtypes)
        places, sizes = {}, [0] * len(buckets)
        for name, parameter in layout.parameters.items():
            start = sizes[part_of(name)]
            sizes[part_of(name)] = end = start + parameter.shape[0] * parameter.dtype.itemsize
            places[name] = slice(start, end)
        memory = torch.zeros(max(sizes, default=0), dtype=torch.uint8, device=device)
        self.parameters = {name: memory[place].view(layout.parameters[name].dtype) for name, place in places.items()}
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
