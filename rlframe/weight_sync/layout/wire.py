"""Layouts as arrays for sending between processes, because 20,000 boxes take seconds to unpickle one by one.

Ranks with the same layout, such as replicas, send the same bytes. Whoever receives them has one object for all.
"""

import gc
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakValueDictionary

import numpy as np

from rlframe.weight_sync.layout.boxes import Box, Padding
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A `WireLayout` as bytes."""

    key: bytes
    """Hash of `data`."""
    data: bytes


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


_received: "WeakValueDictionary[bytes, MemoryLayout]" = WeakValueDictionary()
"""Layouts that somebody here still holds, by key."""


def pack(layout: MemoryLayout) -> PackedLayout:
    """Returns the layout as bytes."""
    index = {name: number for number, name in enumerate(layout.parameters)}
    numbers = box_numbers(layout, {name: number for number, name in enumerate(layout.boxes)}, index)
    parameters = tuple(layout.parameters.items())
    data = pickle.dumps(WireLayout(numbers, tuple(layout.boxes), parameters, layout.tensors, layout.padding))
    return PackedLayout(blake2b(data).digest(), data)


def unpack(packed: PackedLayout) -> MemoryLayout:
    """Returns the layout from the bytes, the same object for the same bytes."""
    layout = _received.get(packed.key)
    if layout is None:
        layout = _received[packed.key] = _layout(pickle.loads(packed.data))
    return layout


def box_numbers(layout: MemoryLayout, tensors: Mapping[str, int], parameters: Mapping[str, int]) -> np.ndarray:
    """Returns [boxes, 9] int64 the boxes in the columns of `WireLayout.numbers`, with these numbers of the names."""
    rows = [
        (tensors[name], box.row, box.rows, box.col, box.cols, parameters[box.parameter], box.offset, box.row_stride,
         box.col_stride)
        for name, boxes in layout.boxes.items()
        for box in boxes
    ]  # fmt: skip
    return np.array(rows, dtype=np.int64).reshape(len(rows), 9)


def _layout(packed: WireLayout) -> MemoryLayout:
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
