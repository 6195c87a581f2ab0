"""A recorded layout, put to use."""

import torch

from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, load_tensor


def replay(layout: MemoryLayout, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters as the recording fills them."""
    parameters = {name: torch.full(each.shape, torch.nan) for name, each in layout.parameters.items()}
    clear_padding(layout, parameters)
    for name, value in checkpoint.items():
        load_tensor(layout, parameters, name, value)
    return parameters
