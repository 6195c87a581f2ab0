"""Tensors on their way between processes: as one array of bytes, which pickle and Ray move beside the message. torch
pickles each tensor of the CPU into the message itself, at a tenth of the speed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 8
"""Greatest size in bytes of an element: each tensor begins at a multiple of it."""
Sent = tuple[NDArray[np.uint8], dict[str, tuple[str, tuple[int, ...], int, int]], dict[str, Any]]
"""The bytes of all tensors; by name, each tensor's number format, shape and stretch of bytes; the other values."""


def sent(values: Mapping[str, Any]) -> Sent:
    """Returns the message of these values."""
    held: list[tuple[int, int, NDArray[np.uint8]]] = []
    places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    others, end = {}, 0
    for name, value in values.items():
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        # numpy has no bfloat16; its bits do.
        bits = value.view(torch.int16) if value.dtype is torch.bfloat16 else value
        array = np.ascontiguousarray(bits.detach().cpu().numpy()).reshape(-1).view(np.uint8)
        start = end + -end % ALIGNMENT
        end = start + array.size
        held.append((start, end, array))
        places[name] = (str(value.dtype)[len("torch.") :], tuple(value.shape), start, end)
    content = np.zeros(end, dtype=np.uint8)
    for start, stop, array in held:
        content[start:stop] = array
    return content, places, others


def received(message: Sent) -> dict[str, Any]:
    """Returns the values of a message, the tensors on memory of its own: Ray's is shared and cannot be written."""
    content, places, others = message
    own = torch.from_numpy(np.array(content))
    tensors = {
        name: own[start:end].view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, start, end) in places.items()
    }
    return others | tensors
