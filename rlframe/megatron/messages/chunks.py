"""Tensors that travel together."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

EXPORT_CHUNK_BYTES = 1 << 28
"""Tensors are fetched for export in groups of about this size."""
Pieces = Mapping[str, list[tuple[tuple[int, ...], Tensor]]]
"""By tensor, the (row, rows, col, cols) of each piece and its values."""


def chunks(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[list[str]]:
    """Yields tensor names in order, in groups of about EXPORT_CHUNK_BYTES."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        names.append(name)
        size += torch.Size(shape).numel() * dtype.itemsize
        if size >= EXPORT_CHUNK_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
