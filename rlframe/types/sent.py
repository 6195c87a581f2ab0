"""Conversion of tensors to numpy arrays for messages between processes.

Pickle protocol 5 and Ray move a numpy array without a copy into the message. torch pickles a CPU tensor into the
message itself, at a tenth of the speed.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BFLOAT16 = "bfloat16"


def sent(value: Any) -> Any:
    """Returns the array of a tensor, on the same memory where the tensor is contiguous and on the CPU. An array of
    bfloat16 is a pair of `bfloat16` and its bits as int16, since numpy has no such format. Other values stay."""
    if not isinstance(value, Tensor):
        return value
    held = value.detach().cpu().contiguous()
    return (BFLOAT16, held.view(torch.int16).numpy()) if held.dtype is torch.bfloat16 else held.numpy()


def received(value: Any) -> Any:
    """Returns the tensor from which `sent` made `value`, as a copy, since Ray shares it read-only."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray) and value[0] == BFLOAT16:
        return own(value[1]).view(torch.bfloat16)
    return own(value) if isinstance(value, np.ndarray) else value


def own(array: NDArray[np.generic]) -> Tensor:
    """Returns a tensor with a copy of an array."""
    return torch.from_numpy(np.array(array))
