"""Plans with arrays: all boxes of a rank are intersected with all parts of the trainer in a few operations of numpy.

The result is that of `piecewise`, copy for copy. Ranks whose layouts are one object (replicas, and the engines after
the first) are intersected once. What is left for Python is one choice for each copy, because each is read from the
replica that has been read least so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.layout.wire import box_numbers
from rlframe.weight_sync.plan.copies import COLUMN, COLUMNS, Copies
from rlframe.weight_sync.plan.merging import merge

Ints = NDArray[np.int64]
Place = tuple[str, str]
"""Host and device of a rank."""
TENSOR, ROW, ROWS, COL, COLS, PARAMETER, OFFSET, ROW_STRIDE, COL_STRIDE = range(9)
"""Columns of a table of boxes. Tensors and parameters are numbers that all ranks of a side share."""


class BoxTables:
    """The boxes of each layout of a side as an array, [boxes, 9], made once for each object."""

    def __init__(self, layouts: Sequence[MemoryLayout], tensors: dict[str, int]):
        distinct = {id(layout): layout for layout in layouts}
        names = sorted({name for layout in distinct.values() for name in layout.parameters})
        self.parameters = np.array(names, dtype=object)
        """Names of the parameters of all ranks, sorted."""
        numbers = {name: index for index, name in enumerate(names)}
        self._tables = {key: box_numbers(layout, tensors, numbers) for key, layout in distinct.items()}

    def of(self, layout: MemoryLayout) -> Ints:
        """Returns the boxes of one of the layouts, in its order."""
        return self._tables[id(layout)]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The parts of a destination rank's boxes that lie in one region of the trainer each, in the order of its boxes."""

    box: Ints
    """Index of the destination's box."""
    region: Ints
    """Index of the trainer's region."""
    row: Ints
    col: Ints
    rows: Ints
    cols: Ints


class Regions:
    """The distinct parts in which the trainer holds each tensor, and the ranks that hold them."""

    def __init__(self, tables: Sequence[Ints], num_tensors: int):
        self.boxes = np.concatenate(tables) if tables else np.zeros((0, 9), dtype=np.int64)
        """The boxes of all ranks, one rank after the other."""
        ranks = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        columns = [self.boxes[:, index] for index in (COLS, COL, ROWS, ROW, TENSOR)]
        order = np.lexsort(columns)
        same = np.ones(max(0, len(order) - 1), dtype=bool)
        for column in columns:
            same &= column[order][1:] == column[order][:-1]
        starts = np.flatnonzero(np.concatenate([[True], ~same])) if len(order) else np.zeros(0, dtype=np.int64)
        # The sort is stable: the first box of a group is the first that names the region, by rank and by box.
        by_tensor = np.lexsort((order[starts], self.boxes[order[starts], TENSOR]))
        counts = np.diff(starts, append=len(order))[by_tensor]
        starts = starts[by_tensor]
        self.table = self.boxes[order[starts], : COLS + 1]
        """[regions, 5] tensor, row, rows, col, cols; regions of one tensor in the order in which ranks name them."""
        self.first = np.searchsorted(self.table[:, TENSOR], np.arange(num_tensors + 1))
        """[tensors + 1] first region of each tensor."""
        held = ranks[order].tolist()
        ids: dict[tuple[int, ...], int] = {}
        self.holders = np.array(
            [
                ids.setdefault(tuple(held[start : start + count]), len(ids))
                for start, count in zip(starts, counts, strict=True)
            ],
            dtype=np.int64,
        )
        """[regions] index of the region's ranks in `sets`."""
        self.sets = list(ids)
        """The distinct lists of ranks that hold a region, ascending."""
        self._order, self._starts = order, starts
        self._position = np.zeros((len(self.sets), len(tables)), dtype=np.int64)
        for index, members in enumerate(self.sets):
            # Backwards: of two copies on one rank (a tied weight) the first is read.
            self._position[index, list(reversed(members))] = np.arange(len(members))[::-1]

    @property
    def is_grid(self) -> bool:
        """Returns whether the regions of every tensor are the cells of a grid, so that none overlap."""
        bands = [_bands(self.table[:, [TENSOR, begin, begin + 1]]) for begin in (ROW, COL)]
        if any(overlap for _, overlap in bands):
            return False
        expected = np.ones(len(self.first) - 1, dtype=np.int64)
        for tensors, _ in bands:
            expected *= np.bincount(tensors, minlength=len(expected))
        return bool((expected == np.diff(self.first)).all())

    def intersect(self, boxes: Ints) -> Pairs:
        """Returns the parts of `boxes` that lie in each region."""
        first, end = self.first[boxes[:, TENSOR]], self.first[boxes[:, TENSOR] + 1]
        box = np.repeat(np.arange(len(boxes)), end - first)
        region = np.arange(len(box)) - np.repeat(np.cumsum(end - first) - (end - first), end - first) + first[box]
        sides = []
        for begin in (ROW, COL):
            mine, theirs = boxes[box], self.table[region]
            start = np.maximum(mine[:, begin], theirs[:, begin])
            stop = np.minimum(mine[:, begin] + mine[:, begin + 1], theirs[:, begin] + theirs[:, begin + 1])
            sides.append((start, stop - start))
        (row, rows), (col, cols) = sides
        keep = (rows > 0) & (cols > 0)
        return Pairs(*(each[keep] for each in (box, region, row, col, rows, cols)))

    def box_of(self, region: Ints, rank: Ints) -> Ints:
        """Returns [pairs, 9] the box in which each rank holds each region."""
        return self.boxes[self._order[self._starts[region] + self._position[self.holders[region], rank]]]


class Planner:
    """Chooses the source of each copy, and counts the load of each source."""

    def __init__(self, regions: Regions, places: Sequence[Place]):
        self._regions, self._places = regions, places
        self._load = [0] * len(places)

    def copies(self, pairs: Pairs, boxes: Ints, place: Place, destination: int) -> tuple[Ints, Ints]:
        """Returns (table of the copies with the numbers of `BoxTables` in place of names, tensor of each copy) that
        fill the boxes of a rank at `place`."""
        far = [2 * (here[1] == "cpu" or here != place) + (here[0] != place[0]) for here in self._places]
        nearest = [min(far[rank] for rank in members) for members in self._regions.sets]
        near = [
            tuple(dict.fromkeys(rank for rank in members if far[rank] == least))
            for members, least in zip(self._regions.sets, nearest, strict=True)
        ]
        holders = self._regions.holders[pairs.region]
        # The nearest regions of a tensor are read first.
        order = np.lexsort((np.array(nearest, dtype=np.int64)[holders], pairs.box))
        box, region, row, col, rows, cols = (
            each[order] for each in (pairs.box, pairs.region, pairs.row, pairs.col, pairs.rows, pairs.cols)
        )
        source = self._choose(holders[order], rows * cols, near)
        read, write = self._regions.box_of(region, source), boxes[box]
        table = np.zeros((len(box), len(COLUMNS)), dtype=np.int64)
        for name, values in {"source": source, "rows": rows, "cols": cols}.items():
            table[:, COLUMN[name]] = values
        table[:, COLUMN["destination"]] = destination
        for side, held in (("read", read), ("write", write)):
            down, right = row - held[:, ROW], col - held[:, COL]
            offset = held[:, OFFSET] + down * held[:, ROW_STRIDE] + right * held[:, COL_STRIDE]
            for name, values in (
                ("parameter", held[:, PARAMETER]),
                ("offset", offset),
                ("row_stride", held[:, ROW_STRIDE]),
                ("col_stride", held[:, COL_STRIDE]),
            ):
                table[:, COLUMN[f"{side}_{name}"]] = values
        return table, write[:, TENSOR]

    def _choose(self, holders: Ints, sizes: Ints, near: list[tuple[int, ...]]) -> Ints:
        """Returns for each copy the least loaded of the nearest holders, in the order of copies."""
        load = self._load
        chosen = []
        for index, size in zip(holders.tolist(), sizes.tolist(), strict=True):
            ranks = near[index]
            rank = ranks[0] if len(ranks) == 1 else min(ranks, key=load.__getitem__)
            load[rank] += size
            chosen.append(rank)
        return np.array(chosen, dtype=np.int64)


def plan_tables(
    sources: Sequence[MemoryLayout],
    destinations: Sequence[MemoryLayout],
    here: Sequence[Place],
    there: Sequence[Place],
) -> list[Copies] | None:
    """Returns the copies of each destination rank. None if the parts of the trainer overlap without being equal, or if
    no rank of it holds some element, which `piecewise` names.

    Args:
        here: host and device of each source rank.
        there: the same of each destination rank.
    """
    tensors: dict[str, int] = {}
    for layout in {id(layout.tensors): layout for layout in [*sources, *destinations]}.values():
        for name in layout.tensors:
            tensors.setdefault(name, len(tensors))
    reading, writing = BoxTables(sources, tensors), BoxTables(destinations, tensors)
    regions = Regions([reading.of(layout) for layout in sources], len(tensors))
    if not regions.is_grid:
        return None
    planner, names = Planner(regions, here), np.array(list(tensors), dtype=object)
    found: dict[int, Pairs] = {}
    plan = []
    for rank, (layout, place) in enumerate(zip(destinations, there, strict=True)):
        boxes = writing.of(layout)
        if id(layout) not in found:
            found[id(layout)] = pairs = regions.intersect(boxes)
            filled = np.bincount(pairs.box, weights=pairs.rows * pairs.cols, minlength=len(boxes))
            if (filled != boxes[:, ROWS] * boxes[:, COLS]).any():
                return None
        table, carried = planner.copies(found[id(layout)], boxes, place, rank)
        plan.append(_named(*merge(table, carried), reading.parameters, writing.parameters, names))
    return plan


def _bands(table: Ints) -> tuple[Ints, bool]:
    """Returns (tensor of each distinct band, whether two bands of a tensor overlap) of [regions, 3]: tensor, begin and
    length of a band of rows or of columns."""
    bands = np.unique(table, axis=0)
    tensor, begin, length = bands.T
    overlap = (tensor[1:] == tensor[:-1]) & (begin[1:] < begin[:-1] + length[:-1])
    return tensor, bool(overlap.any())


def _named(table: Ints, carried: Ints, reads: NDArray, writes: NDArray, tensors: NDArray) -> Copies:
    """Returns the copies with the names that they use."""

    def used(column: str, names: NDArray) -> tuple[str, ...]:
        mine, table[:, COLUMN[column]] = np.unique(table[:, COLUMN[column]], return_inverse=True)
        return tuple(names[mine])

    mine, carried = np.unique(carried, return_inverse=True)
    return Copies(
        table,
        used("read_parameter", reads),
        used("write_parameter", writes),
        tuple(tensors[mine]),
        carried.astype(np.int32),
    )
