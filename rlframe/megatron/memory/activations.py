"""Inputs of recomputed layers, in host memory until the backward pass.

With recompute=full they are all that a layer keeps: 2 * H bytes a token in bfloat16. A copy to the host runs beside the
computation of the layer; a copy back is waited for, as long as it takes the link to carry one layer's input.
Megatron-Core's own offloading (0.16.1 to 0.19.2) refuses recomputation, or is of modules within a layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor in host memory."""

    values: Tensor
    device: torch.device
    done: Any = None
    """The CUDA event after which the copy is complete."""


class HostCopies:
    """Puts what autograd saves into host memory, and brings it back."""

    def __init__(self, hidden_size: int):
        self.hidden_size = hidden_size
        self.count = 0
        """Number of tensors that were put into host memory."""
        self._stream: Any = None

    def put(self, tensor: Tensor) -> Tensor | HostCopy:
        """Returns a copy on the host of hidden states [T, 1, H]; other tensors, which layers share, as they are."""
        if tensor.dim() != 3 or tensor.shape[-1] != self.hidden_size or isinstance(tensor, torch.nn.Parameter):
            return tensor
        self.count += 1
        if not tensor.is_cuda:
            return HostCopy(tensor.clone(), tensor.device)
        self._stream = self._stream or torch.cuda.Stream()
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            values.copy_(tensor, non_blocking=True)
        # Its memory is not given to others before the copy is done.
        tensor.record_stream(self._stream)
        return HostCopy(values, tensor.device, self._stream.record_event())

    def get(self, kept: Tensor | HostCopy) -> Tensor:
        """Returns what `put` was given."""
        if isinstance(kept, Tensor):
            return kept
        if kept.done is not None:
            torch.cuda.current_stream().wait_event(kept.done)
        return kept.values.to(kept.device, non_blocking=True)


def offload_layer_inputs(module: GPTModel) -> HostCopies:
    """Makes the layers of the module keep their inputs in host memory. They must be recomputed as a whole."""
    copies = HostCopies(module.config.hidden_size)
    compute = module.decoder.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with saved_tensors_hooks(copies.put, copies.get):
            return compute(*arguments, **options)

    module.decoder.forward = forward
    return copies
