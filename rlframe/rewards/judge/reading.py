"""Reads a judge's words: a score, by a pattern, a choice or JSON."""

import json
import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

BEGIN_THOUGHTS, THOUGHTS = "<think>", "</think>"
"""Begins and ends the thoughts of models that write them into their reply."""
OBJECT = re.compile(r'\{\s*"')
"""Pattern of the beginning of a JSON object."""
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}]', re.DOTALL)
"""Pattern of brackets, and of strings, in which they do not count."""
Number = Annotated[float, Range(-(10**6), 10**6)]


class Form(StrEnum):
    """Forms of a verdict."""

    PATTERN = "pattern"
    """A number that a regular expression finds."""
    CHOICE = "choice"
    """One of some words."""
    JSON = "json"
    """A number in an object."""


@dataclass(kw_only=True, slots=True)
class ReadingConfig:
    """Settings of how a judge's reply becomes a number. The last verdict in it counts; thoughts before `</think>` are
    left out, and a reply that was cut off in its thoughts has none."""

    form: Form = Form.PATTERN
    """Form of the verdict."""
    pattern: str = r"(?i)score[\s*_]*[:=][\s*_]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number. The default one finds bold numbers and words too. Only with
    form=pattern."""
    choices: Annotated[dict[str, float], Range(-(10**6), 10**6)] = field(default_factory=dict)
    """Value of each word that the judge may end with. Only with form=choice."""
    key: str = "score"
    """Name of the number in the object. Only with form=json."""
    lowest: Number = 0.0
    """Least number of the judge's scale, which becomes 0. A number outside of the scale counts as unreadable. Not with
    form=choice, whose values stay as they are."""
    highest: Number = 10.0
    """Greatest number of the judge's scale, which becomes 1."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, form in (("pattern", Form.PATTERN), ("choices", Form.CHOICE), ("key", Form.JSON)):
            self._refuse(name, without=self.form is not form)
        for name in ("lowest", "highest"):
            self._refuse(name, without=self.form is Form.CHOICE)
        if self.form is Form.CHOICE and not self.choices:
            raise SettingError("choices", "must have at least one choice with form=choice", got="none")
        if self.highest <= self.lowest:
            raise SettingError("highest", f"must be above lowest={self.lowest:g}", got=self.highest)
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise SettingError(
                "pattern", "must be a regular expression", got=repr(self.pattern), why=str(error)
            ) from error
        if not groups:
            raise SettingError("pattern", "must have a group, round the number", got=repr(self.pattern))

    def _refuse(self, name: str, *, without: bool) -> None:
        made = type(self).__dataclass_fields__[name]
        default = made.default_factory() if callable(made.default_factory) else made.default
        if without and getattr(self, name) != default:
            raise SettingError(name, f"has no effect with form={self.form}", got=getattr(self, name), hint="remove it")


class Unreadable(Exception):
    """Raised for a reply without a verdict."""


def read(reply: str, config: ReadingConfig) -> float:
    """Returns the last verdict in a reply.

    Raises:
        Unreadable: there is none.
    """
    said = without_thoughts(reply)
    if config.form is Form.CHOICE:
        return config.choices[last_choice(said, config.choices)]
    if config.form is Form.PATTERN:
        found = [match.group(1) for match in re.finditer(config.pattern, said)]
        text: Any = found[-1] if found else None
    else:
        text = _last_object(said).get(config.key)
    try:
        number = float(text)
    except (TypeError, ValueError, OverflowError):
        raise Unreadable(f"no number in {said[-80:]!r}") from None
    if isinstance(text, bool) or not (math.isfinite(number) and config.lowest <= number <= config.highest):
        raise Unreadable(f"{text} is not a number from {config.lowest:g} to {config.highest:g}")
    return (number - config.lowest) / (config.highest - config.lowest)


def without_thoughts(reply: str) -> str:
    """Returns what a reply says after its thoughts."""
    _, ended, said = reply.rpartition(THOUGHTS)
    return said.strip() if ended or not said.lstrip().startswith(BEGIN_THOUGHTS) else ""


def last_choice(said: str, choices: Any) -> str:
    """Returns the one of `choices` that a text names last, as a whole word.

    Raises:
        Unreadable: it names none.
    """
    words = "|".join(re.escape(choice) for choice in sorted(choices, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", said)
    if not found:
        raise Unreadable(f"none of {', '.join(choices)} in {said[-80:]!r}")
    return found[-1]


def _last_object(said: str) -> dict[str, Any]:
    """Returns the last whole JSON object in a text that is not within another one, such as one that was cut off."""
    # Strings may have line feeds as they are.
    decoder, last, place = json.JSONDecoder(strict=False), None, said.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(said, place)
        except (ValueError, RecursionError):
            end = _after_object(said, place) if OBJECT.match(said, place) else place + 1
        else:
            last = found if isinstance(found, dict) else last
        place = said.find("{", end)
    if last is None:
        raise Unreadable(f"no JSON object in {said[-80:]!r}")
    return last


def _after_object(said: str, place: int) -> int:
    """Returns the position after the bracket that closes the one at `place`, or the end of the text if none does."""
    depth = 0
    for found in BRACKETS.finditer(said, place):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.end()
    return len(said)
