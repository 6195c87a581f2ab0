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

Rows = tuple[tuple[int, int], ...]
"""Runs of rows of a slice: (first, number)."""


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
    def of(cls, name: str, boxes: Sequence[Box], layout: MemoryLayout) -> "Slice":
        """Returns the slice in the parameter `name`.

        Args:
            boxes: the boxes of the parameter.
        """
        shape = layout.parameters[name].shape
        assert len(shape) == 2, name
        rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for box in sorted(boxes, key=lambda box: (_matrix(box, layout), box.row, box.col)):
            for first, count in _rows(box, shape[1]):
                for half, begin, end in _halves(name, shape[0], first, first + count):
                    rows[_matrix(box, layout) + half].append((begin, end - begin))
        first = min(boxes, key=lambda box: (_matrix(box, layout), box.row, box.col))
        return cls(
            parameter=_matrix(first, layout),
            shape=(shape[0], shape[1]),
            origin=(first.row, first.col),
            turned=first.cols > 1 and first.col_stride % shape[1] == 0,
            matrices=tuple((matrix, tuple(runs)) for matrix, runs in rows.items()),
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
        counts = [sum(count for _, count in each.matrices[index][1]) for each in self.slices]
        columns = [each.shape[1] for each in self.slices]
        return (sum(counts), columns[0]) if self.axis == 0 else (counts[0], sum(columns))

    def matrices(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns each matrix whole, from the elements of `sources`."""
        slices = [
            torch.cat([own for part, own in zip(self.sources, parts, strict=True) if part.slice.origin == each.origin])
            for each in self.slices
        ]
        return [
            torch.cat(
                [
                    torch.cat([values.view(each.shape)[first : first + count] for first, count in runs])
                    for each, values in zip(self.slices, slices, strict=True)
                    for _, runs in [each.matrices[index]]
                ],
                dim=self.axis,
            )
            for index in range(len(self.slices[0].matrices))
        ]

    def elements_of_parts(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Undoes `matrices`. Returns the elements of `parts`, those of Muon's update: each matrix with its scale."""
        slices = {each.origin: matrices[0].new_empty(each.shape) for each in self.slices}
        for index, matrix in enumerate(matrices):
            begin = 0
            scaled = matrix * scale(*matrix.shape)
            for each in self.slices:
                runs = each.matrices[index][1]
                size = sum(count for _, count in runs) if self.axis == 0 else each.shape[1]
                own = scaled.narrow(self.axis, begin, size)
                begin += size
                for (first, count), rows in zip(runs, own.split([count for _, count in runs]), strict=True):
                    slices[each.origin][first : first + count] = rows
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


def slices_of(layout: MemoryLayout, names: Iterable[str]) -> Mapping[str, Slice]:
    """Returns the slices in the parameters `names`."""
    boxes: dict[str, list[Box]] = {name: [] for name in names}
    for own in layout.boxes.values():
        for box in own:
            if box.parameter in boxes:
                boxes[box.parameter].append(box)
    return {name: Slice.of(name, own, layout) for name, own in boxes.items()}


def _matrix(box: Box, layout: MemoryLayout) -> str:
    """Returns the name of the matrix of a box: the tensor, and the expert if one tensor holds all of a layer."""
    shape = layout.tensors[box.tensor]
    return f"{box.tensor}[{box.row // shape[-2]:06d}]" if len(shape) > 2 else box.tensor


def _rows(box: Box, columns: int) -> Iterator[tuple[int, int]]:
    """Yields the runs of rows of a parameter with `columns` columns that a box covers."""
    axes = ((box.rows, box.row_stride), (box.cols, box.col_stride))
    moving = [(count, stride // columns) for count, stride in axes if count > 1 and stride % columns == 0]
    ((count, step),) = moving or ((1, 1),)
    first = box.offset // columns
    if step == 1:
        yield first, count
    else:
        yield from ((first + step * index, 1) for index in range(count))


def _halves(name: str, rows: int, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yields the parts of rows `begin` to `end`. Of the first matrix of an MLP, the upper half is the gate; a
    checkpoint may keep both in one tensor."""
    if not name.endswith("linear_fc1.weight"):
        yield "", begin, end
        return
    middle = rows // 2
    if begin < middle:
        yield ".gate", begin, min(end, middle)
    if end > middle:
        yield ".up", max(begin, middle), end

