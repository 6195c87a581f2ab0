"""Matrices of all experts that lie in memory one behind the other, as Megatron's buffers have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class Stacked:
    """Matrices [O, I] of all experts as one."""

    matrix: Float[Tensor, "E*O I"]
    """[E * O, I] in the order of memory."""
    count: int
    """Number E of experts."""
    step: int
    """1 if they are in the order of the experts, -1 if in the opposite one, as Megatron's buffers have them."""

    @property
    def first(self) -> int:
        """Returns the place in memory of the first expert's, counted in experts."""
        return 0 if self.step == 1 else self.count - 1

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape [O, I] of each."""
        return len(self.matrix) // self.count, self.matrix.shape[1]


def stacked(matrices: Sequence[Tensor]) -> Stacked | None:
    """Returns matrices of one shape as one, or None if they do not lie so."""
    first, size = matrices[0], matrices[0].nbytes
    if not all(each.is_contiguous() and each.dtype == first.dtype for each in matrices):
        return None
    distances = {after.data_ptr() - before.data_ptr() for before, after in pairwise(matrices)} or {size}
    step = {size: 1, -size: -1}.get(distances.pop()) if len(distances) == 1 else None
    storages = {each.untyped_storage().data_ptr() for each in (first, matrices[-1])}
    if step is None or len(storages) > 1:
        return None
    rows, columns = first.shape
    lowest = first if step == 1 else matrices[-1]
    return Stacked(lowest.detach().as_strided((len(matrices) * rows, columns), (columns, 1)), len(matrices), step)


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns what the GPU's copying of parts [rows, columns] needs to know."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a table on a device, for which the host does not wait."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
