"""Layouts as arrays for sending between processes, because 20,000 boxes take seconds to unpickle one by one."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rlframe.weight_sync.layout.boxes import Box, Padding
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter


@dataclass(frozen=True, slots=True)
class WireLayout:
    """A `MemoryLayout` whose boxes are one array."""

    numbers: np.ndarray
    """[boxes, 9] int64: tensor, row, rows, col, cols, parameter, offset, row_stride, col_stride."""
    held: tuple[str, ...]
    """Names to which the first column refers, each with its boxes in a row."""
    parameters: tuple[tuple[str, Parameter], ...]
    """Names to which the parameter column refers."""
    tensors: dict[str, tuple[int, ...]]
    padding: tuple[Padding, ...]


def pack(layout: MemoryLayout) -> WireLayout:
    """Returns the layout as arrays."""
    index = {name: number for number, name in enumerate(layout.parameters)}
    rows = [
        (tensor, *box.region, index[box.parameter], box.offset, box.row_stride, box.col_stride)
        for tensor, boxes in enumerate(layout.boxes.values())
        for box in boxes
    ]
    numbers = np.array(rows, dtype=np.int64).reshape(len(rows), 9)
    return WireLayout(numbers, tuple(layout.boxes), tuple(layout.parameters.items()), layout.tensors, layout.padding)


def unpack(packed: WireLayout) -> MemoryLayout:
    """Returns the layout from the arrays."""
    names = [name for name, _ in packed.parameters]
    boxes: dict[str, list[Box]] = {name: [] for name in packed.held}
    with no_collection():
        for tensor, row, rows, col, cols, parameter, *place in packed.numbers.tolist():
            name = packed.held[tensor]
            boxes[name].append(Box(name, row, rows, col, cols, names[parameter], *place))
    return MemoryLayout(
        boxes={name: tuple(mine) for name, mine in boxes.items()},
        tensors=packed.tensors,
        parameters=dict(packed.parameters),
        padding=packed.padding,
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables Python's search for reference cycles inside the block. With 100,000 new small objects, none of them in a
    cycle, the search takes longer than creating them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
