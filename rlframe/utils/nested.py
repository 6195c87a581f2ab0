"""Nested dicts as one, by dotted key."""

from collections.abc import Iterator, Mapping
from typing import Any


def flat(value: Any) -> dict[str, Any]:
    """Returns the scalars, lists and empty dicts of a nested dict by dotted key."""
    return dict(_leaves(value, ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
