"""Calls to another process: a method of a Protocol, with its arguments.

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
    """A method of a rank that its driver calls, and the arguments. Picklable: the method is sent as its name."""

    method: Callable[..., T_co]
    """Method of the Protocol. The rank executes its own method of that name."""
    arguments: tuple[Any, ...] = ()

    @staticmethod
    def of(method: Callable[[R_contra, *Ts], T], *arguments: *Ts) -> "RankCall[R_contra, T]":
        """Returns a call of `method` with positional `arguments`."""
        return RankCall(method, arguments)

    def on(self, rank: R_contra) -> T_co:
        """Executes the call on `rank` and returns the result."""
        return getattr(rank, self.name)(*self.arguments)

    @property
    def name(self) -> str:
        """Name of the method, for messages."""
        return self.method.__name__

    def __str__(self) -> str:
        """Returns the name of the method. For a call that forwards another one, returns the name of the forwarded
        one."""
        return str(self.arguments[0]) if self.arguments and isinstance(self.arguments[0], RankCall) else self.name
