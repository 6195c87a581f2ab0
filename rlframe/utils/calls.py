"""Calls that travel to another process: the method of a Protocol, with its arguments.

Each border between processes has one Protocol. A caller names its methods (`RankCall.of(SourceRank.digests)`), so that
the type checker compares the arguments, and an editor finds the method from the call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple

R_contra = TypeVar("R_contra", contravariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class RankCall(Generic[R_contra, T_co]):
    """A method of what a rank is to its driver, and the arguments. Picklable: the method travels as its name."""

    method: Callable[..., T_co]
    """Of the Protocol; a rank carries out its own method of that name."""
    arguments: tuple[Any, ...] = ()

    @staticmethod
    def of(method: Callable[[R_contra, *Ts], T], *arguments: *Ts) -> "RankCall[R_contra, T]":
        """Returns a call of `method` with `arguments`, all of them by position."""
        return RankCall(method, arguments)

    def on(self, rank: R_contra) -> T_co:
        """Returns what `rank` answers."""
        return getattr(rank, self.name)(*self.arguments)

    @property
    def name(self) -> str:
        """Of the method, for messages."""
        return self.method.__name__

    def __str__(self) -> str:
        """Returns what is asked in the end: of a call that only passes another one on, the name of that."""
        return str(self.arguments[0]) if self.arguments and isinstance(self.arguments[0], RankCall) else self.name
