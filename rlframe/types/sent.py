"""Tensors on their way between processes: as arrays, whose memory pickle and Ray move beside the message. torch pickles
each tensor of the CPU into the message itself, at a tenth of the speed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sent = tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, Any]]
"""By name, each tensor's number format and elements; the other values."""


def sent(values: Mapping[str, Any]) -> Sent:
    """Returns the message of these values. Its arrays share the memory of contiguous tensors on the CPU, so that the
    only copy is the one into Ray's memory."""
    arrays = {name: _array(value) for name, value in values.items() if isinstance(value, Tensor)}
    return arrays, {name: value for name, value in values.items() if name not in arrays}


def _array(value: Tensor) -> tuple[str, NDArray[Any]]:
    # numpy has no bfloat16; its bits do.
    bits = value.view(torch.int16) if value.dtype is torch.bfloat16 else value
    # Only contiguous arrays travel beside the message.
    return str(value.dtype)[len("torch.") :], bits.detach().cpu().contiguous().numpy()


def received(message: Sent) -> dict[str, Any]:
    """Returns the values of a message, the tensors on memory of their own: Ray's is shared and cannot be written."""
    arrays, others = message
    tensors = {
        name: torch.from_numpy(np.array(array)).view(getattr(torch, dtype)) for name, (dtype, array) in arrays.items()
    }
    return others | tensors
