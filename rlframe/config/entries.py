"""Sections with entries of one's own name, such as `reward.parts`: entries that the command line names replace those of
the files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

SECTIONS = ("reward.parts",)
WHOLE = ("data.path={",)
"""Beginnings of words that set a mapping as one value. With `+` before it, a word adds to the mapping of the files."""


def deletions(section: str, arguments: Sequence[str], there: Mapping[str, Any]) -> list[str]:
    """Returns the overrides `~section.name` that remove the entries of the files, if `arguments` name others.

    `reward.parts.mine.name=...` names one. `+reward.parts.mine.name=...` adds one and removes none. An entry that any
    argument mentions stays, and all stay beside a choice of the group on the command line (`reward=math`).

    Args:
        arguments: as users write them.
        there: the entries of the files.
    """
    group = section.partition(".")[0]
    if any(argument.startswith(f"{group}=") for argument in arguments) or {f"~{group}", f"~{section}"} & set(arguments):
        return []
    if not any(True for argument in arguments for _ in _named(section, argument)):
        return []
    mentioned = {name for argument in arguments for name in _mentioned(section, argument)}
    return [f"~{section}.{name}" for name in there if name not in mentioned]


def _named(section: str, argument: str) -> Iterator[str]:
    """Yields the entries that an argument sets by name, as a whole or all at once."""
    key, equals, value = argument.partition("=")
    if not equals or not key.startswith(section) or value == "null":
        return
    rest = key.removeprefix(section)
    if match := re.fullmatch(r"\.([^.]+)(\.name)?", rest):
        yield match[1]
    elif not rest:
        yield from _keys(value)


def _mentioned(section: str, argument: str) -> Iterator[str]:
    key = argument.lstrip("+~").partition("=")[0]
    if key.startswith(f"{section}."):
        yield key.removeprefix(f"{section}.").partition(".")[0]
    yield from _named(section, argument)


def _keys(value: str) -> list[str]:
    """Returns the names in `{mine: {name: x}}`. Other values are left to those who read them."""
    try:
        found = OverridesParser.create().parse_override(f"x={value}").value()
    except (HydraException, ValueError):
        return []
    return [str(key) for key in found] if isinstance(found, dict) else []
