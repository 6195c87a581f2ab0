"""Bounds of the value of a setting, stated next to its type: `Annotated[float, Range(above=0, maximum=1)]`.

A dataclass of settings calls `check_bounds(self)` first in its `__post_init__`. Every number states both ends and is
therefore finite, which a test checks.
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault

LONGEST_PATH_BYTES = 4095
"""Greatest number of bytes of a path: PATH_MAX of Linux, without the terminating zero."""
LONGEST_NAME_BYTES = 255
"""Greatest number of bytes of one folder or file of a path: NAME_MAX of Linux."""


# Two are never equal: typing keeps one of equal ones, and 1e9 would read as 1000000000 where another setting has that.
@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Range of the numbers that a setting can have; of each member of a list, or each value of a mapping."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """Exclusive lower bound, instead of `minimum`."""
    below: float | None = None
    """Exclusive upper bound, instead of `maximum`."""
    note: str = ""
    """Meaning of a special value, or reason for a bound."""

    judges: ClassVar = (int, float)

    def __post_init__(self) -> None:
        assert (self.minimum is None) != (self.above is None) and (self.maximum is None) != (self.below is None)

    def refusal(self, value: Any) -> tuple[str, str] | None:
        """Returns `must be at least 0 (0: never)` and `-1`, or None for a number in the range."""
        ends = {
            f"at least {self.minimum}": self.minimum is None or value >= self.minimum,
            f"above {self.above}": self.above is None or value > self.above,
            f"at most {self.maximum}": self.maximum is None or value <= self.maximum,
            f"below {self.below}": self.below is None or value < self.below,
        }
        note = f" ({self.note})" if self.note else ""
        return next(((f"must be {end}{note}", shortened(value)) for end, kept in ends.items() if not kept), None)


@dataclass(frozen=True, slots=True)
class PathText:
    """Marks a text that can name a file or a folder; of each text of a list, or each name of a mapping."""

    judges: ClassVar = str

    def refusal(self, value: Any) -> tuple[str, str] | None:
        """Returns the rule for names of files and the offending value, or None."""
        whole = len(value.encode(errors="replace"))
        name = max(len(part.encode(errors="replace")) for part in value.split("/"))
        if whole <= LONGEST_PATH_BYTES and name <= LONGEST_NAME_BYTES:
            return None
        return (
            f"must be a path of at most {LONGEST_PATH_BYTES} bytes with names of at most {LONGEST_NAME_BYTES}",
            f"{whole} bytes with a name of {name}: {shortened(value)}",
        )


Seconds = Annotated[float, Range(above=0, maximum=604_800, note="a week at most")]
"""A limit of time."""


def check_bounds(config: Any) -> None:
    """Checks every field of a dataclass whose type has a Range or a PathText.

    Raises:
        SettingError: the first field whose value is outside.
    """
    values = {name: getattr(config, name) for name in bounds(type(config))}
    for fault in out_of_bounds(type(config), values):
        raise SettingError(fault)


def out_of_bounds(kind: type, values: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields a fault for each value, by the name of its field, outside of the bounds in the dataclass `kind`."""
    for name, stated in bounds(kind).items():
        for value, where in _members(values.get(name)):
            for bound in stated:
                if isinstance(value, bound.judges) and (refusal := bound.refusal(value)):
                    yield Fault(name, refusal[0], got=f"{refusal[1]}{where}")


@cache
def bounds(kind: type) -> Mapping[str, tuple[Range | PathText, ...]]:
    """Returns the bounds that the dataclass `kind` states, by field."""
    hints = get_type_hints(kind, include_extras=True)
    stated = {name: tuple(_metadata(hint)) for name, hint in hints.items()}
    return {name: found for name, found in stated.items() if found}


def _metadata(hint: Any) -> Iterator[Range | PathText]:
    """Yields the bounds of `Annotated[float, ...]` and of `Annotated[float, ...] | None`."""
    if get_origin(hint) is Annotated:
        yield from (stated for stated in get_args(hint)[1:] if isinstance(stated, Range | PathText))
    elif get_origin(hint) in (Union, types.UnionType):
        for option in get_args(hint):
            yield from _metadata(option)


def _members(value: Any) -> Iterator[tuple[Any, str]]:
    """Yields a value, or the members of a list, or the names and values of a mapping; each with its position."""
    if isinstance(value, Mapping):
        yield from ((name, "") for name in value)
        yield from ((member, f" for {shortened(name)}") for name, member in value.items())
    elif isinstance(value, list):
        yield from ((member, "") for member in value)
    else:
        yield value, ""


def shortened(value: Any) -> str:
    """Returns a value as Python writes it, long texts truncated."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write a whole number of more than 4300 digits.
        return f"a whole number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
