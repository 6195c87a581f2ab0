"""Copies as arrays: a rank's part of the plan, small to send and quick to iterate."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np


@dataclass(frozen=True, slots=True)
class Place:
    """Position of one side of a copy: elements of a parameter, counted from its first."""

    parameter: str
    offset: int
    row_stride: int
    col_stride: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided block from one source rank to one destination rank."""

    tensors: tuple[str, ...]
    """Names of the Hugging Face tensors of which it carries parts: one, or several that are adjacent on both sides."""
    source: int
    """Source rank."""
    rows: int
    cols: int
    read: Place
    """Position in the source rank's memory."""
    write: Place
    """Position in the destination rank's memory."""


COLUMNS = (
    "source",
    "destination",
    "rows",
    "cols",
    "read_parameter",
    "read_offset",
    "read_row_stride",
    "read_col_stride",
    "write_parameter",
    "write_offset",
    "write_row_stride",
    "write_col_stride",
    "first_tensor",
    "end_tensor",
)
"""Columns of `Copies.table`. Ranks are numbered within their side; the rest is in elements."""
COLUMN = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True, eq=False)
class Copies(Sequence[Copy]):
    """A list of `Copy` that pickles as one array. 20,000 of them take 3 MB and a few milliseconds."""

    table: np.ndarray
    """[copies, COLUMNS] int64."""
    read_parameters: tuple[str, ...]
    """Names to which the column `read_parameter` refers."""
    write_parameters: tuple[str, ...]
    tensors: tuple[str, ...]
    """Names of the Hugging Face tensors carried."""
    carried: np.ndarray
    """Indices into `tensors`. Copy i carries those from `first_tensor` to before `end_tensor`."""

    @classmethod
    def of(cls, copies: Iterable[tuple[int, Copy]]) -> "Copies":
        """Returns the copies of pairs (destination rank, copy), in their order."""
        reads, writes, tensors = _Numbers(), _Numbers(), _Numbers()
        rows: list[tuple[int, ...]] = []
        carried: list[int] = []
        for destination, copy in copies:
            first = len(carried)
            carried += [tensors[name] for name in copy.tensors]
            read, write = copy.read, copy.write
            rows.append(
                (
                    copy.source,
                    destination,
                    copy.rows,
                    copy.cols,
                    reads[read.parameter],
                    read.offset,
                    read.row_stride,
                    read.col_stride,
                    writes[write.parameter],
                    write.offset,
                    write.row_stride,
                    write.col_stride,
                    first,
                    len(carried),
                )
            )
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS))
        return cls(table, tuple(reads), tuple(writes), tuple(tensors), np.array(carried, dtype=np.int32))

    @classmethod
    def joined(cls, several: Sequence["Copies"]) -> "Copies":
        """Returns the copies of all of `several`, in their order."""
        names = all_reads, all_writes, all_tensors = _Numbers(), _Numbers(), _Numbers()
        tables, carried, first = [], [], 0
        for each in several:
            table = each.table.copy()
            reads, writes, tensors = (
                np.array([number[name] for name in mine], dtype=np.int64)
                for number, mine in zip(names, (each.read_parameters, each.write_parameters, each.tensors), strict=True)
            )
            for column, numbers in (("read_parameter", reads), ("write_parameter", writes)):
                table[:, COLUMN[column]] = numbers[table[:, COLUMN[column]]]
            table[:, [COLUMN["first_tensor"], COLUMN["end_tensor"]]] += first
            tables.append(table)
            carried.append(tensors[each.carried].astype(np.int32))
            first += len(each.carried)
        table = np.concatenate(tables) if tables else np.zeros((0, len(COLUMNS)), dtype=np.int64)
        return cls(
            table,
            tuple(all_reads),
            tuple(all_writes),
            tuple(all_tensors),
            np.concatenate(carried or [np.zeros(0, dtype=np.int32)]),
        )

    def column(self, name: str) -> np.ndarray:
        """Returns [copies] one column of the table."""
        return self.table[:, COLUMN[name]]

    @property
    def sources(self) -> list[int]:
        """Source ranks that are read, ascending."""
        return np.unique(self.column("source")).tolist()

    @property
    def destinations(self) -> list[int]:
        """Destination ranks that are written, ascending."""
        return np.unique(self.column("destination")).tolist()

    def select(self, mask: np.ndarray) -> "Copies":
        """Returns the copies where `mask`, [copies] bool, is true."""
        return Copies(self.table[mask], self.read_parameters, self.write_parameters, self.tensors, self.carried)

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> "Copies": ...
    def __getitem__(self, index: int | slice) -> "Copy | Copies":
        if isinstance(index, slice):
            return Copies(self.table[index], self.read_parameters, self.write_parameters, self.tensors, self.carried)
        return self._copy(self.table[index].tolist())

    def __iter__(self) -> Iterator[Copy]:
        return map(self._copy, self.table.tolist())

    def _copy(self, row: list[int]) -> Copy:
        source, _, rows, cols, reads, *read = row[:8]
        writes, *write = row[8:12]
        return Copy(
            tuple(self.tensors[index] for index in self.carried[row[12] : row[13]]),
            source,
            rows,
            cols,
            Place(self.read_parameters[reads], *read),
            Place(self.write_parameters[writes], *write),
        )


class _Numbers(dict[str, int]):
    """Numbers names in the order of their first use."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]
