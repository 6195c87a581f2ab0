"""The interface of a form of tool calls, and what several of them read."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from rlframe.attempts.rendering.reply import Call, Part, schema_of, schemas_of
from rlframe.data.records import parse_json
from rlframe.data.text.tool_calls import Tool

SPACE = re.compile(r"\s*")
PYTHON = {"True": True, "False": False, "None": None}
"""Values that some templates write as Python does."""
KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
"""Types of JSON schemas by the type of a value that is no text."""


class Format(ABC):
    """Base of all forms of tool calls. Instances have no state."""

    markers: ClassVar[Sequence[str]] = ()
    """Tokens that belong to calls. None of them ends a turn."""

    @staticmethod
    @abstractmethod
    def is_written_by(template: str) -> bool:
        """Returns whether the text of a chat template writes calls in this form."""

    @abstractmethod
    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """Returns text and calls of a turn, in order. Nothing that the policy can write is an error.

        White space that templates put round calls is left out; a text without calls is one part, as it is.

        Args:
            text: the turn without its reasoning and without the token that ended it.
            tools: the offered tools by name, whose schemas tell the types of values that are written bare.
        """

    def plain(self, text: str) -> list[Part]:
        """Returns a turn to which no tool was offered: all of it is text, whatever it reads like."""
        return [text]


class NoCalls(Format):
    """Stands for a template that has no calls: all is text."""

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return False

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts."""
        return [text]


def read_object(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `start`, and the position after it.

    Raises:
        ValueError: there is none, or one that `parse_json` refuses.
    """
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return parse_json(text[start:end]), end


def after_space(text: str, at: int) -> int:
    """Returns the position of the first character from `at` that is no white space."""
    match = SPACE.match(text, at)
    return match.end() if match else at


def call_of(value: Any, text: str, *, arguments: str = "arguments") -> Call:
    """Returns the call {name, arguments, id} that `text` says in JSON."""
    if not isinstance(value, dict):
        return Call(text=text, fault="a call must be a JSON object with a name and arguments")
    if "name" not in value or arguments not in value:
        return Call(text=text, fault=f'a call must have the keys "name" and "{arguments}"')
    return Call(text=text, name=value["name"], arguments=value[arguments], id=value.get("id"))


def bare_value(text: str, name: str, tool: Tool | None) -> Any:
    """Returns the value of an argument that is written without quotes: what it is in JSON, or text, which it also is
    where its schema takes text and not such a value."""
    kinds = set(_kinds(schemas_of(tool).get(name), schema_of(tool))) if tool else set()
    if text in PYTHON:
        value = PYTHON[text]
    else:
        try:
            value = parse_json(text)
        except ValueError:
            return text
    # A text that may be null, as optional ones of MCP servers, may not be a number.
    return text if "string" in kinds and not kinds & KINDS.get(type(value), set()) else value


def _kinds(schema: Any, whole: Any, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the types that a JSON schema names, itself or by a reference into `whole`.

    Args:
        seen: references that have led here.
    """
    if isinstance(schema, dict):
        kind = schema.get("type")
        yield from (each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str))
        for choice in ("anyOf", "oneOf", "allOf"):
            if isinstance(schemas := schema.get(choice), list):
                yield from chain.from_iterable(_kinds(each, whole, seen) for each in schemas)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
            place = whole
            for name in reference.split("/")[1:]:
                place = place.get(name) if isinstance(place, dict) else None
            yield from _kinds(place, whole, seen | {reference})


def calls_in(text: str, beginning: str, read: Callable[[str, int], tuple[Call, int]]) -> list[Part]:
    """Returns the parts of a text whose calls have a beginning of their own.

    Args:
        read: returns the call that begins at a position, and the position after it.
    """
    found: list[Part] = []
    at = 0
    while (start := text.find(beginning, at)) >= 0:
        call, end = read(text, start)
        found += [text[at:start], call]
        at = end
    return trimmed([*found, text[at:]])


def trimmed(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts without white space beside calls, and without empty texts."""
    if not any(isinstance(part, Call) for part in parts):
        return list(parts)
    kept: list[Part] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            part = part if index == 0 else part.lstrip()
            part = part if index == len(parts) - 1 else part.rstrip()
        if part != "":
            kept.append(part)
    return kept
