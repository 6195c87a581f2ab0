"""Compiles the kernels of weight sync before it begins."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.plan.copy_kernels import CopyTable, Pair
from rlframe.weight_sync.proof.digest import common_units
from rlframe.weight_sync.proof.digest_kernels import DigestTable


def compile_kernels(layout: MemoryLayout, parameters: Mapping[str, Tensor]) -> None:
    """Compiles the kernels with which this memory is digested, and copied to memory like it, on a GPU. Triton keeps
    them on disk, where the ranks of engines on this machine find them too."""
    DigestTable(layout, parameters, list(layout.boxes), units=common_units([layout]))
    pairs: dict[torch.dtype, list[Pair]] = {}
    for box in (box for boxes in layout.boxes.values() for box in boxes):
        held = parameters[box.parameter]
        address = held.data_ptr() + box.offset * held.dtype.itemsize
        strides = (box.row_stride, box.col_stride)
        pairs.setdefault(held.dtype, []).append(Pair(address, address, box.rows, box.cols, *strides, *strides))
    for dtype, same in pairs.items():
        # Compiled here and never run.
        CopyTable(same, dtype, dtype, next(iter(parameters.values())).device)
