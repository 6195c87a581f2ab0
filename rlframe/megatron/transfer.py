"""Copies between host and device for which neither waits: through pinned memory, in the order of the stream.

A copy out of pageable memory, and a number that the host reads, stop the host until the device has done all that it was
told. The device then idles until the host has told it more, in every micro-batch.
"""

import torch
from torch import Tensor


def upload(value: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a CPU tensor on `device`, or the tensor itself if that is the CPU."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value


def download(value: Tensor) -> Tensor:
    """Returns a copy on the CPU, which is there once `wait` returns. A CPU tensor is returned itself."""
    if value.device.type != "cuda":
        return value
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


def wait(device: torch.device) -> None:
    """Waits for the stream of `device`, and so for all downloads from it. Does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
