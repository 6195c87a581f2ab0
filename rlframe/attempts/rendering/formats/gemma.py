"""Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`, texts between tokens of their own."""

import re
from collections.abc import Mapping
from typing import Any

from rlframe.attempts.rendering.formats.base import Format, calls_in
from rlframe.attempts.rendering.reply import Call, Part
from rlframe.data.records import parse_json
from rlframe.data.text.tool_calls import Tool

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HEAD = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")
KEY = re.compile(r"([^:{}\[\],]+):")
BARE = re.compile(r"[^,\]}]*")
MOST_LEVELS = 100


class Gemma(Format):
    """Calls in a notation of their own."""

    markers = (OPEN, CLOSE, QUOTE)

    @staticmethod
    def is_written_by(template: str) -> bool:
        """See Format.is_written_by."""
        return OPEN in template

    def parts(self, text: str, tools: Mapping[str, Tool]) -> list[Part]:
        """See Format.parts."""
        return calls_in(text, OPEN, self._read)

    def _read(self, text: str, start: int) -> tuple[Call, int]:
        """Returns the call whose token is at `start`, and the position after it."""
        head = HEAD.match(text, start + len(OPEN))
        try:
            if not head:
                raise ValueError("it must begin with call:NAME{")
            arguments, after = _value(text, head.end(), levels=0)
            if not text.startswith(CLOSE, after):
                raise ValueError(f"it is not closed by {CLOSE}")
        except ValueError as error:
            close = text.find(CLOSE, start)
            end = len(text) if close < 0 else close + len(CLOSE)
            return Call(text=text[start:end], fault=f"the call cannot be read: {error!s:.120}"), end
        end = after + len(CLOSE)
        return Call(text=text[start:end], name=head[1], arguments=arguments), end


def _value(text: str, at: int, *, levels: int) -> tuple[Any, int]:
    """Returns the value at `at`, and the position after it. Raises ValueError if there is none."""
    if levels > MOST_LEVELS:
        raise ValueError("it is nested too deeply")
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise ValueError(f"a text is not closed by {QUOTE}")
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text.startswith("{", at):
        return _members(text, at + 1, levels=levels)
    if text.startswith("[", at):
        return _items(text, at + 1, levels=levels)
    bare = BARE.match(text, at)
    assert bare
    return parse_json(bare[0].strip()), bare.end()


def _members(text: str, at: int, *, levels: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while not text.startswith("}", at):
        if text.startswith(QUOTE, at):
            key, at = _value(text, at, levels=levels)
            if not text.startswith(":", at):
                raise ValueError("a name must be followed by a colon")
            at += 1
        elif match := KEY.match(text, at):
            key, at = match[1].strip(), match.end()
        else:
            raise ValueError("expected a name and a colon")
        if key in found:
            raise ValueError(f"{key!r:.60} stands twice")
        found[key], at = _value(text, at, levels=levels + 1)
        at = _after_comma(text, at, "}")
    return found, at + 1


def _items(text: str, at: int, *, levels: int) -> tuple[list[Any], int]:
    found = []
    while not text.startswith("]", at):
        item, at = _value(text, at, levels=levels + 1)
        found.append(item)
        at = _after_comma(text, at, "]")
    return found, at + 1


def _after_comma(text: str, at: int, end: str) -> int:
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(end, at):
        raise ValueError(f"expected a comma or {end}")
    return at


FORMAT = Gemma
