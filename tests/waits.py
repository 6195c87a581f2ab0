"""Operators for which the host waits on a GPU, found on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READ = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
}
"""Their result, or its shape, depends on numbers that the device has."""
PLACED = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Waits(TorchDispatchMode):
    """Collects the operators inside the block that would stop the host until a GPU has done all that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if waits(operator, arguments, named):
            self.found.append(str(operator))
        return operator(*arguments, **named)


def waits(operator: Any, arguments: Any, named: dict[str, Any]) -> bool:
    """Returns whether the host waits for an operator."""
    if operator in READ:
        return True
    if operator is aten.repeat_interleave.Tensor:
        return named.get("output_size") is None
    if operator in PLACED or operator is aten.index.Tensor:
        masks = [each for each in arguments[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        # A number that is assigned, as in values[rows] = 0.0, is in host memory.
        number = operator in PLACED and isinstance(arguments[2], Tensor) and arguments[2].dim() == 0
        return bool(masks) or number
    return False
