"""Tensors that are sent together."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

EXPORT_CHUNK_BYTES = 1 << 28
"""Approximate bytes of a group of tensors that are fetched together for export."""
Pieces = Mapping[str, list[tuple[tuple[int, ...], Tensor]]]
"""Pieces of each tensor: (row, rows, col, cols) and values."""


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
