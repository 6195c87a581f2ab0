"""Tensors that travel together."""

from collections.abc import Iterator

import torch

EXPORT_CHUNK_BYTES = 1 << 28
"""Tensors are fetched for export in groups of about this size."""


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
