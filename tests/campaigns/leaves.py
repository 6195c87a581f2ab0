"""Finds every leaf of a configuration from its dataclasses, and what to put there."""

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import EnumType
from typing import Any, Union, get_args, get_origin, get_type_hints

from rlframe.utils.bounds import PathText, Range, bounds
from rlframe.utils.build import as_dict

HOSTILE: dict[str, Any] = {
    "none": None,
    "minus one": -1,
    "zero": 0,
    "half": 0.5,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "nan": math.nan,
    "1e300": 1e300,
    "10**30": 10**30,
    "5000 digits": 10**5000,
    "true": True,
    "empty": "",
    "unknown": "nonesuch",
    "number as text": "1e-3",
    "surrogate": "a\udcff",
    "zero byte": "a\0b",
    "5000 characters": "x" * 5000,
    "list": [],
    "list of lists": [[1]],
    "section": {},
    "section with a key": {"nonesuch": 1},
}
"""What is put in the place of every leaf, and of every section."""
UNKNOWN = "unknown key"
"""Names the trial that puts a key of no meaning beside a leaf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """Holds one value of a configuration, or one section."""

    key: str
    """Dotted."""
    hint: Any
    default: Any
    """Plain, of its dataclass."""
    stated: tuple[Range | PathText, ...]
    """Bounds beside its type."""
    section: bool


def leaves(config: Any, key: str = "") -> Iterator[Leaf]:
    """Yields the fields of a dataclass and of those within it, sections too. A section that is None has none within."""
    hints, known = get_type_hints(type(config)), bounds(type(config))
    for field in fields(config):
        value, dotted = getattr(config, field.name), f"{key}.{field.name}" if key else field.name
        default = field.default if not callable(field.default_factory) else field.default_factory()  # type: ignore[misc]
        stated = known.get(field.name, ())
        yield Leaf(
            key=dotted, hint=hints[field.name], default=as_dict(default), stated=stated, section=is_dataclass(value)
        )
        members = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, member in members:
            if is_dataclass(member):
                yield from leaves(member, f"{dotted}.{name}" if name else dotted)


def other_values(leaf: Leaf, value: Any) -> Iterator[Any]:
    """Yields values that the leaf's type and bounds allow, other than `value`."""
    for option in _options(leaf.hint):
        candidates: list[Any] = []
        if option is bool:
            candidates = [not value]
        elif isinstance(option, EnumType):
            candidates = [member.value for member in option]  # type: ignore[attr-defined]
        elif option in (int, float):
            candidates = list(_numbers(leaf, option, value))
        elif option is types.NoneType:
            candidates = [None]
        yield from (candidate for candidate in candidates if candidate != value)


def _numbers(leaf: Leaf, kind: type, value: Any) -> Iterator[Any]:
    ends = next((bound for bound in leaf.stated if isinstance(bound, Range)), None)
    if ends is None:
        return
    for factor in (2, 0.5):
        if isinstance(value, int | float) and ends.refusal(kind(value * factor)) is None:
            yield kind(value * factor)
    for number in (kind(1), kind(2), kind(3), 0.25):
        if type(number) is kind and ends.refusal(number) is None:
            yield number


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def get(values: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key in nested mappings."""
    for name in key.split("."):
        values = values[name]
    return values


def put(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns the nested mappings with another value at a dotted key."""
    name, _, rest = key.partition(".")
    return {**values, name: put(values[name], rest, value) if rest else value}


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, of the same kind; not a number equals itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return type(one) is type(other) and one == other
