"""Nested dicts as one, by dotted key; nested settings beside others."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
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


def followed(mine: Any, before: Any, after: Any) -> Any:
    """Returns `mine` with what `after` changes of the settings that it had in common with `before`."""
    changed = {}
    for name in (each.name for each in fields(mine)):
        own, old, new = (getattr(settings, name) for settings in (mine, before, after))
        if old == new:
            continue
        if own == old:
            changed[name] = new
        elif is_dataclass(own) and type(own) is type(old) is type(new):
            changed[name] = followed(own, old, new)
    return replace(mine, **changed)
