"""Joins the copies of a rank that continue each other on both sides, such as the up rows below the gate rows."""

import numpy as np
from numpy.typing import NDArray

from rlframe.weight_sync.plan.copies import COLUMN

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ROWS, COLS = COLUMN["rows"], COLUMN["cols"]
OFFSETS = [COLUMN["read_offset"], COLUMN["write_offset"]]
DOWN = [COLUMN["read_row_stride"], COLUMN["write_row_stride"]]
RIGHT = [COLUMN["read_col_stride"], COLUMN["write_col_stride"]]
SIDES = [COLUMN["source"], COLUMN["read_parameter"], COLUMN["write_parameter"]]


def merge(table: Ints, tensors: Ints) -> tuple[Ints, Ints]:
    """Returns (the copies with neighbours joined, the tensors that they carry).

    Copies are taken in the order of their source and of the place that is read. Each is joined to what is joined so far
    if it continues it: along rows, or else along columns.

    Args:
        table: [copies, COLUMNS] with numbers of parameters in the order of their names. Fills `first_tensor` and
            `end_tensor`.
        tensors: [copies] the tensor that each carries.
    """
    order = np.lexsort([table[:, column] for column in (OFFSETS[0], *reversed(SIDES))])
    table, tensors = table[order], tensors[order]
    if not len(table):
        return table, tensors
    starts, sizes = _runs(table)
    first = np.flatnonzero(starts)
    joined = table[first]
    joined[:, [ROWS, COLS]] = sizes[first]
    run = np.cumsum(starts) - 1
    # Each tensor once, where a run names it first.
    names = run * (int(tensors.max()) + 1) + tensors
    keep = np.sort(np.unique(names, return_index=True)[1])
    ends = np.cumsum(np.bincount(run[keep], minlength=len(first)))
    joined[:, COLUMN["first_tensor"]], joined[:, COLUMN["end_tensor"]] = np.concatenate([[0], ends[:-1]]), ends
    return joined, tensors[keep]


def _runs(table: Ints) -> tuple[Bools, Ints]:
    """Returns ([copies] whether a copy begins a run that becomes one, [copies, 2] rows and columns of the run that
    begins there)."""
    sizes = table[:, [ROWS, COLS]]
    kin = _kin(table[:-1], table[1:])
    below = kin & _below(table[:-1], table[1:])
    right = kin & ~below & _right(table[:-1], table[1:])
    starts = np.concatenate([[True], ~(below | right)])
    first = np.flatnonzero(starts)
    sums = np.add.reduceat(sizes, first)
    for axis, links in enumerate((below, right)):
        grown = np.append(links, False)[first]
        sizes[first[grown], axis] = sums[grown, axis]
    # One by one where more can follow than neighbours show: both directions, columns of several widths, or a whole run
    # that is continued where its last part is not.
    stretch = np.concatenate([[0], np.cumsum(~kin)])
    marks = np.zeros((3, int(stretch[-1]) + 1), dtype=bool)
    marks[0, stretch[1:][below]] = marks[1, stretch[1:][right]] = True
    marks[2, stretch[1:][right & (table[1:, COLS] != table[:-1, COLS])]] = True
    whole, following = table[first[:-1]], table[first[1:]]
    whole[:, [ROWS, COLS]] = sizes[first[:-1]]
    more = _kin(whole, following) & (_below(whole, following) | _right(whole, following))
    marks[2, stretch[first[1:]][more]] = True
    for index in np.flatnonzero(marks[0] & marks[1] | marks[2]).tolist():
        begin, end = np.searchsorted(stretch, [index, index + 1]).tolist()
        starts[begin:end], sizes[begin:end] = _one_by_one(table[begin:end])
    return starts, sizes


def _one_by_one(table: Ints) -> tuple[Bools, Ints]:
    """Returns the same for a few copies of the same parameters and strides."""
    starts, sizes = np.ones(len(table), dtype=bool), table[:, [ROWS, COLS]]
    begin, whole = 0, table[:1].copy()
    for index in range(1, len(table)):
        following = table[index : index + 1]
        if _below(whole, following)[0]:
            whole[0, ROWS] += following[0, ROWS]
        elif _right(whole, following)[0]:
            whole[0, COLS] += following[0, COLS]
        else:
            begin, whole = index, following.copy()
            continue
        starts[index], sizes[begin] = False, whole[0, [ROWS, COLS]]
    return starts, sizes


def _kin(before: Ints, after: Ints) -> Bools:
    """Returns whether both have the same source, parameters and strides."""
    columns = [*SIDES, *DOWN, *RIGHT]
    return (before[:, columns] == after[:, columns]).all(1)


def _below(before: Ints, after: Ints) -> Bools:
    """Returns whether the second continues the first along rows, on both sides."""
    return (before[:, COLS] == after[:, COLS]) & _steps(before, after, ROWS, DOWN)


def _right(before: Ints, after: Ints) -> Bools:
    """Returns whether the second continues the first along columns, on both sides."""
    return (before[:, ROWS] == after[:, ROWS]) & _steps(before, after, COLS, RIGHT)


def _steps(before: Ints, after: Ints, count: int, strides: list[int]) -> Bools:
    """Returns whether the second begins where the first ends, on both sides."""
    return (after[:, OFFSETS] - before[:, OFFSETS] == before[:, [count]] * before[:, strides]).all(1)
