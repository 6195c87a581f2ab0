"""The matrices that Muon orthogonalises: where their elements lie, and which rank puts them together.

Megatron keeps several matrices of the checkpoint in one parameter (q, k and v; gate and up). Tensor parallelism cuts a
parameter into slices, and the distributed optimizer gives each rank a range of a slice's elements, read row by row. A
`Part` is such a range, described without Megatron. The parts of one parameter on all ranks are a `Job`. One of the
ranks that hold any of it does the job, so that the ranks share the work and none holds more than its jobs.

Few elements move for it: a rank's range of the gradient buffer covers most parameters whole, so that without tensor
parallelism only those at its ends are on two ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlframe.megatron.muon.newton_schulz import operations, scale
from rlframe.weight_sync.layout.boxes import Box
from rlframe.weight_sync.layout.memory import MemoryLayout

ROUND_ELEMENTS = 1 << 26
"""Bound of the elements that a rank puts together at once, unless one parameter has more."""

Rows = tuple[range, ...]
"""Rows of a slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A rank's slice of a parameter that holds one matrix of the checkpoint or several."""

    parameter: str
    """The same on all ranks: the first matrix of the checkpoint in it."""
    shape: tuple[int, int]
    origin: tuple[int, int]
    """Row and column of the checkpoint's tensor at which the slice begins."""
    turned: bool
    """Whether rows of the parameter are columns of the checkpoint's tensor."""
    matrices: tuple[tuple[str, Rows], ...]
    """The rows of each matrix, in the checkpoint's order."""

    @classmethod
    def of(cls, name: str, boxes: Sequence[Box], layout: MemoryLayout, *, alternating: bool) -> "Slice":
        """Returns the slice in the parameter `name`; see `slices_of`.

        Args:
            boxes: the boxes of the parameter.
        """
        rows, columns = layout.parameters[name].shape
        boxes = sorted(boxes, key=lambda box: (matrix_of(box, layout), box.row, box.col))
        held: dict[str, list[range]] = defaultdict(list)
        for box in boxes:
            for half, own in halves(name, rows_of(box, columns), middle=rows // 2, alternating=alternating):
                held[matrix_of(box, layout) + half].append(own)
        first = boxes[0]
        return cls(
            parameter=matrix_of(first, layout),
            shape=(rows, columns),
            origin=(first.row, first.col),
            turned=first.row_stride % columns != 0 if first.rows > 1 else first.col_stride % columns == 0,
            matrices=tuple((matrix, tuple(own)) for matrix, own in held.items()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The elements `start` to `end` of a slice, of which `rank` keeps main weights and momentum."""

    rank: int
    slice: Slice
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.start

    @property
    def key(self) -> tuple[str, tuple[int, int], int]:
        """The same for copies of a part alone."""
        return self.slice.parameter, self.slice.origin, self.start

    @property
    def place(self) -> tuple[tuple[int, int], int]:
        """The order of the parts of a parameter."""
        return self.slice.origin, self.start


class Job:
    """One parameter that is orthogonalised."""

    def __init__(self, parts: Iterable[Part]):
        self.parts = sorted(parts, key=lambda part: (part.place, part.rank))
        """Every part and its copies: tensor-parallel ranks may all hold a parameter whole."""
        self.sources = list({part.place: part for part in reversed(self.parts)}.values())[::-1]
        """Each part once, of the lowest rank."""
        self.slices = list({part.slice.origin: part.slice for part in self.sources}.values())
        self.owner = -1
        """The rank that does the job."""
        for each in self.slices:
            held = sum(part.size for part in self.sources if part.slice.origin == each.origin)
            assert held == each.shape[0] * each.shape[1], f"{each.parameter}: ranks keep {held} of {each.shape}"

    @cached_property
    def axis(self) -> int:
        """The axis of the parameter that is cut into slices."""
        first, last = self.slices[0], self.slices[-1]
        by_row = first.origin[0] != last.origin[0]
        return int(by_row == first.turned) if len(self.slices) > 1 else 0

    @cached_property
    def elements(self) -> int:
        """Number of elements of all slices."""
        return sum(each.shape[0] * each.shape[1] for each in self.slices)

    def cost(self, steps: int) -> float:
        """Returns the floating-point operations of the job."""
        shapes = [self._shape(index) for index in range(len(self.slices[0].matrices))]
        return sum(operations(*shape, steps=steps) for shape in shapes)

    def _shape(self, index: int) -> tuple[int, int]:
        """Returns the shape of a whole matrix."""
        counts = [sum(map(len, each.matrices[index][1])) for each in self.slices]
        columns = [each.shape[1] for each in self.slices]
        return (sum(counts), columns[0]) if self.axis == 0 else (counts[0], sum(columns))

    def matrices(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns each matrix whole, from the elements of `sources`."""
        slices = [
            torch.cat([own for part, own in zip(self.sources, parts, strict=True) if part.slice.origin == each.origin])
            for each in self.slices
        ]
        found = []
        for index in range(len(self.slices[0].matrices)):
            cut = [
                torch.cat([values.view(each.shape)[own.start : own.stop : own.step] for own in each.matrices[index][1]])
                for each, values in zip(self.slices, slices, strict=True)
            ]
            found.append(torch.cat(cut, dim=self.axis))
        return found

    def elements_of_parts(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Undoes `matrices`. Returns the elements of `parts`, those of Muon's update: each matrix with its scale."""
        slices = {each.origin: matrices[0].new_empty(each.shape) for each in self.slices}
        for index, matrix in enumerate(matrices):
            begin = 0
            scaled = matrix * scale(*matrix.shape)
            for each in self.slices:
                rows = each.matrices[index][1]
                size = sum(map(len, rows)) if self.axis == 0 else each.shape[1]
                cut = scaled.narrow(self.axis, begin, size).split([len(own) for own in rows])
                begin += size
                for own, values in zip(rows, cut, strict=True):
                    slices[each.origin][own.start : own.stop : own.step] = values
        return [slices[part.slice.origin].view(-1)[part.start : part.end] for part in self.parts]


def jobs_of(parts: Iterable[Part], *, steps: int) -> list[Job]:
    """Returns the jobs of all ranks, each with its owner: the most expensive first, each to the rank with the least to
    do of those that hold any of it. The result is the same on every rank.

    Args:
        parts: those of all ranks, in any order.
        steps: number of steps of the iteration.
    """
    by_parameter: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_parameter[part.slice.parameter].append(part)
    jobs = [Job(by_parameter[name]) for name in sorted(by_parameter)]
    load: dict[int, float] = defaultdict(float)
    for job in sorted(jobs, key=lambda job: -job.cost(steps)):
        job.owner = min(sorted({part.rank for part in job.parts}), key=lambda rank: load[rank])
        load[job.owner] += job.cost(steps)
    return jobs


def rounds_of(jobs: Iterable[Job], *, limit: int = ROUND_ELEMENTS) -> list[list[Job]]:
    """Returns the jobs in rounds: in each, every rank has at most `limit` elements to put together, or one job."""
    rounds: list[list[Job]] = []
    place: dict[int, int] = defaultdict(int)
    used: dict[int, int] = defaultdict(int)
    for job in jobs:
        owner = job.owner
        if used[owner] and used[owner] + job.elements > limit:
            place[owner], used[owner] = place[owner] + 1, 0
        used[owner] += job.elements
        if place[owner] == len(rounds):
            rounds.append([])
        rounds[place[owner]].append(job)
    return rounds


def slices_of(layout: MemoryLayout, names: Iterable[str], *, alternating: bool) -> Mapping[str, Slice]:
    """Returns the slices in the parameters `names`.

    Args:
        alternating: whether rows of gate and up alternate. Otherwise the gate is the upper half.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in names}
    for own in layout.boxes.values():
        for box in own:
            if box.parameter in boxes:
                boxes[box.parameter].append(box)
    return {name: Slice.of(name, own, layout, alternating=alternating) for name, own in boxes.items()}


def matrix_of(box: Box, layout: MemoryLayout) -> str:
    """Returns the name of the matrix of a box: the tensor, and the expert if one tensor holds all of a layer."""
    shape = layout.tensors[box.tensor]
    return f"{box.tensor}[{box.row // shape[-2]}]" if len(shape) > 2 else box.tensor


def rows_of(box: Box, columns: int) -> range:
    """Returns the rows of a parameter with `columns` columns that a box covers."""
    axes = ((box.rows, box.row_stride), (box.cols, box.col_stride))
    moving = [(count, stride // columns) for count, stride in axes if count > 1 and stride % columns == 0]
    count, step = moving[0] if moving else (1, 1)
    first = box.offset // columns
    return range(first, first + step * count, step)


def halves(name: str, rows: range, *, middle: int, alternating: bool) -> Iterator[tuple[str, range]]:
    """Yields the rows of a parameter that belong to one matrix, and a name for it. The first product of an MLP has a
    gate and an up projection, which a checkpoint may keep in one tensor."""
    if not name.endswith("linear_fc1.weight"):
        yield "", rows
        return
    for half in (0, 1):
        first = [row for row in rows[:2] if row % 2 == half]
        if alternating and first:
            yield f" {half}", range(first[0], rows.stop, max(2, rows.step))
        elif not alternating:
            assert rows.step == 1, name
            own = range(max(rows.start, half * middle), min(rows.stop, (half + 1) * middle))
            yield from [(f" {half}", own)] if own else []
