"""Boxes: rectangles of Hugging Face tensors and their positions in a parameter's memory.

Hugging Face tensors are treated as matrices: a 1-D tensor is one row, and the leading dimensions of anything above 2-D
are flattened into rows.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Region(NamedTuple):
    """A rectangle of a Hugging Face tensor that is treated as a matrix."""

    row: int
    rows: int
    col: int
    cols: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    def intersect(self, other: "Region") -> "Region | None":
        """Returns the common part of both, or None."""
        row, col = max(self.row, other.row), max(self.col, other.col)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        cols = min(self.col + self.cols, other.col + other.cols) - col
        return Region(row, rows, col, cols) if rows > 0 and cols > 0 else None

    def minus(self, part: "Region") -> list["Region"]:
        """Returns the rest without `part`, which lies inside: the regions above, below, left and right of it."""
        below, right = part.row + part.rows, part.col + part.cols
        rest = [
            Region(self.row, part.row - self.row, self.col, self.cols),
            Region(below, self.row + self.rows - below, self.col, self.cols),
            Region(part.row, part.rows, self.col, part.col - self.col),
            Region(part.row, part.rows, right, self.col + self.cols - right),
        ]
        return [region for region in rest if region.size]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a Hugging Face tensor and its position in a parameter.

    Example: rows 4..7 of a [8, 2] tensor at the start of the contiguous parameter `fc1`: Box("up_proj", 4, 4, 0, 2,
    "fc1", 0, 2, 1)
    """

    tensor: str
    """Name of the tensor in the Hugging Face checkpoint."""
    row: int
    rows: int
    col: int
    cols: int
    parameter: str
    """Name of the parameter in this process."""
    offset: int
    """Elements from the parameter's first element to the box's first."""
    row_stride: int
    """Elements of the parameter's storage from one row of the box to the next."""
    col_stride: int
    """Elements of the parameter's storage from one column of the box to the next."""

    @property
    def region(self) -> Region:
        """The region of the tensor."""
        return Region(self.row, self.rows, self.col, self.cols)

    def offset_of(self, region: Region) -> int:
        """Returns the elements from the parameter's first element to the first of `region`, which lies inside the
        box."""
        return self.offset + (region.row - self.row) * self.row_stride + (region.col - self.col) * self.col_stride

    def view(self, parameters: Mapping[str, Tensor], region: Region | None = None) -> Tensor:
        """Returns [rows, cols] the box, or `region` of it, in the memory of its parameter."""
        part = region or self.region
        size, stride = (part.rows, part.cols), (self.row_stride, self.col_stride)
        return window(parameters[self.parameter], self.offset_of(part), size, stride)


def in_one_run(boxes: Iterable[Box]) -> bool:
    """Returns whether the rows of the `boxes` of one tensor follow each other in it without a gap."""
    rows = sorted((box.row, box.row + box.rows) for box in boxes)
    return all(end == start for (_, end), (start, _) in pairwise(rows))


@dataclass(frozen=True, slots=True)
class Padding:
    """A part of a parameter that no tensor fills and that the loader zeroes, such as the rows of a padded
    vocabulary."""

    parameter: str
    offset: int
    """Elements from the parameter's first element."""
    size: tuple[int, ...]
    stride: tuple[int, ...]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (rows, columns) of a tensor of `shape` seen as a matrix."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def window(parameter: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Returns [*size] a view of the parameter's storage that starts `offset` elements after its first, outside
    autograd."""
    parameter = parameter.detach()
    return parameter.as_strided(size, stride, parameter.storage_offset() + offset)
