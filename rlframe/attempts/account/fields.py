"""Fields of records as JSON, also those that Parquet has and JSON does not: moments, decimal numbers and bytes."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

PLAIN, DICT = "plain", "dict"
SEQUENCES = {"list": list, "tuple": tuple}
"""Maps of Parquet are lists of tuples."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Writes and reads values of one type."""

    type: type
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


KINDS = {
    "datetime": Kind(datetime, datetime.isoformat, datetime.fromisoformat),
    "date": Kind(date, date.isoformat, date.fromisoformat),
    "time": Kind(time, time.isoformat, time.fromisoformat),
    "duration": Kind(
        timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda of: timedelta(*of)
    ),
    "decimal": Kind(Decimal, str, Decimal),
    "bytes": Kind(bytes, lambda value: b64encode(value).decode(), b64decode),
}
NAMES = {kind.type: name for name, kind in KINDS.items()}


def described(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns fields as JSON: those that are plain by themselves, and others that `restored` knows. Fields of any other
    type are left out."""
    plain = {name: value for name, value in fields.items() if type(name) is str and is_plain(value)}
    others = {name: written for name, value in fields.items() if name not in plain and (written := _written(value))}
    return {"fields": plain, "other_fields": others} if others else {"fields": plain}


def restored(described: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields out of a description, and returns them."""
    others = described.pop("other_fields", {})
    return described.pop("fields") | {name: _read(value) for name, value in others.items()}


def is_plain(value: Any) -> bool:
    """Returns whether JSON reads `value` back as it is."""
    if type(value) is dict:
        return all(type(key) is str and is_plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _written(value: Any) -> list[Any] | None:
    """Returns the kind of a value and its text, or None if it has no kind."""
    if is_plain(value):
        return [PLAIN, value]
    name = type(value).__name__
    if SEQUENCES.get(name) is type(value):
        items = [_written(inner) for inner in value]
        return None if None in items else [name, items]
    if type(value) is dict:
        inner = {key: _written(each) for key, each in value.items()}
        return None if None in inner.values() or not all(type(key) is str for key in inner) else [DICT, inner]
    known = NAMES.get(type(value))
    return [known, KINDS[known].write(value)] if known else None


def _read(written: list[Any]) -> Any:
    kind, value = written
    if kind in SEQUENCES:
        return SEQUENCES[kind](map(_read, value))
    if kind == DICT:
        return {key: _read(each) for key, each in value.items()}
    return value if kind == PLAIN else KINDS[kind].read(value)
