"""Sequences that hold positions instead of objects, for datasets that do not fit in memory as objects."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """A sequence whose elements are made when they are requested. A slice of it is a list."""

    def __init__(self, make: Callable[[int], T], places: Sequence[int]):
        """Stores the positions.

        Args:
            make: returns the element at a position.
            places: positions in the order of the sequence.
        """
        self._make, self._places = make, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(place) for place in self._places[index]]
        return self._make(self._places[index])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, self._places)


class Joined(Sequence[T], Generic[T]):
    """Several sequences as one. A slice of it is a list."""

    def __init__(self, parts: Sequence[Sequence[T]]):
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        part = bisect_right(self._ends, place)
        return self._parts[part][place - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)
