"""Many objects of a dataclass on their way between processes, field by field.

pickle takes microseconds for each object and each array, and a step has hundreds of attempts with several arrays each.
A message of columns has a few arrays and lists of plain values, however many objects there are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class Packed(Generic[T]):
    """Objects of one class as a message: dataclasses with slots, whose fields may be such objects or lists of them.

    Objects that several others have in the same field arrive as one object. One-dimensional arrays arrive as parts of a
    common one, which may lie in Ray's memory: nothing may write into them.

    Example:
        >>> from rlframe.types.input import ModelInput
        >>> [len(each) for each in Packed([ModelInput((7, 8)), ModelInput((5,))]).objects()]
        [2, 1]
    """

    __slots__ = ("_column",)

    def __init__(self, objects: Sequence[T]):
        """Shares the memory of the objects until it is pickled."""
        self._column = column_of(list(objects))

    def objects(self) -> list[T]:
        """Returns the objects, which are new ones."""
        return list(self._column.read())


class Same(NamedTuple):
    """A value that all objects have."""

    value: Any
    length: int

    def read(self) -> Iterable[Any]:
        """Returns the value of each object."""
        return repeat(self.value, self.length)


class Each(NamedTuple):
    """Values that pickle takes one by one."""

    values: list[Any]

    def read(self) -> Iterable[Any]:
        """Returns the value of each object."""
        return self.values


class Shared(NamedTuple):
    """Values of which several objects have the same."""

    column: "Column"
    places: NDArray[np.int64]
    """The place in `column` of each object's value."""

    def read(self) -> Iterable[Any]:
        """Returns the value of each object."""
        return map(list(self.column.read()).__getitem__, self.places.tolist())


class Joined(NamedTuple):
    """One-dimensional arrays of one number format."""

    elements: NDArray[Any]
    lengths: NDArray[np.int64]

    def read(self) -> Iterable[Any]:
        """Returns the array of each object."""
        return (self.elements[begin:end] for begin, end in _bounds(self.lengths))


class Lists(NamedTuple):
    """Lists, or tuples, of objects of one class."""

    kind: type[Any]
    column: "Column"
    lengths: NDArray[np.int64]

    def read(self) -> Iterable[Any]:
        """Returns the list of each object."""
        elements = list(self.column.read())
        return (self.kind(elements[begin:end]) for begin, end in _bounds(self.lengths))


class Fields(NamedTuple):
    """Objects of one dataclass."""

    kind: type[Any]
    columns: list["Column"]
    """Values of each field, in the order of the fields."""
    length: int

    def read(self) -> Iterable[Any]:
        """Returns the objects. Their classes' own checks have seen them before."""
        found = [object.__new__(self.kind) for _ in range(self.length)]
        for write, column in zip(setters(self.kind), self.columns, strict=True):
            for each, value in zip(found, column.read(), strict=True):
                write(each, value)
        return found


Column = Same | Each | Shared | Joined | Lists | Fields
"""The values that some objects have in one field."""


def column_of(values: list[Any]) -> Column:
    """Returns the message of the values of a field."""
    if not values:
        return Each(values)
    first, kind = values[0], type(values[0])
    if len(values) > 1 and all(value is first for value in values):
        return Same(first, len(values))
    if any(type(value) is not kind for value in values):
        return Each(values)
    if kind is np.ndarray and all(each.ndim == 1 and each.dtype == first.dtype for each in values):
        return _once(values, _joined)
    if has_fields(kind):
        return _once(values, _by_field)
    if kind in (list, tuple) and (elements := list(chain.from_iterable(values))):
        of_one = type(elements[0])
        if has_fields(of_one) and all(type(each) is of_one for each in elements):
            return Lists(kind, column_of(elements), _lengths(values))
    return Each(values)


@cache
def has_fields(kind: type[Any]) -> bool:
    """Returns whether objects of the class are nothing but their fields, also to pickle."""
    plain = is_dataclass(kind) and kind.__dictoffset__ == 0 and kind.__reduce__ is object.__reduce__
    return plain and all(hasattr(getattr(kind, each.name, None), "__set__") for each in fields(kind))


@cache
def setters(kind: type[Any]) -> list[Callable[[Any, Any], None]]:
    """Returns what writes each field of an object, also of a frozen one."""
    return [getattr(kind, each.name).__set__ for each in fields(kind)]


def _once(values: list[Any], pack: Callable[[list[Any]], Column]) -> Column:
    """Returns the message of values, each once however many objects have it."""
    unique = {id(value): value for value in values}
    if len(unique) == len(values):
        return pack(values)
    places = {identity: place for place, identity in enumerate(unique)}
    return Shared(pack(list(unique.values())), np.array([places[id(value)] for value in values]))


def _joined(values: list[Any]) -> Column:
    return Joined(np.concatenate(values), _lengths(values))


def _by_field(values: list[Any]) -> Column:
    kind = type(values[0])
    return Fields(kind, [column_of(list(map(attrgetter(each.name), values))) for each in fields(kind)], len(values))


def _lengths(values: list[Any]) -> NDArray[np.int64]:
    return np.fromiter(map(len, values), np.int64, len(values))


def _bounds(lengths: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    return pairwise(accumulate(lengths.tolist(), initial=0))
