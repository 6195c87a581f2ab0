"""Only the template writes special tokens: text of a record that reads like one stays text.

If a record's texts contain none, nothing here changes a token. Otherwise, for example with `<|im_end|>`, the template
gets the texts with a mark in its place. The rendering is then split at its special tokens, which the template wrote,
and the parts between them are tokenised as text, with the marks replaced.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError

REMEDY = "take it out of the data, or set data.special_tokens_in_text=true to let it be that token"
NEUTRAL = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """A conversation as rendered by its template."""

    marked: str
    """Text with marks."""
    where: str
    """The record, for messages."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """The special token of each mark. Empty if the record's texts have none."""

    @property
    def text(self) -> str:
        """The rendering without marks."""
        return self.with_marks_as(self.marked)

    def with_marks_as(self, text: str, replacement: str | None = None) -> str:
        """Returns `text` with each mark replaced, by what it stands for unless said otherwise."""
        for mark, token in self.marks.items():
            text = text.replace(mark, token if replacement is None else replacement)
        return text


@cache
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the id of each special token, the longest first. Other added tokens, such as `<think>`, are the texts' to
    use."""
    found = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(sorted(found.items(), key=lambda entry: -len(entry[0])))


def marks_for(texts: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns a mark for each special token that stands in a text of `texts`, messages or tools; by the token."""
    every = list(strings(texts))
    present = [token for token in special_tokens(tokenizer) if any(token in text for text in every)]
    if not present:
        return {}
    # Letters and digits, which no template trims, escapes or splits at.
    free = next(number for number in count() if not any(f"Mark{number}x" in text for text in every))
    return {token: f"Mark{free}x{index}x" for index, token in enumerate(present)}


def marked(value: Any, marks: Mapping[str, str]) -> Any:
    """Returns messages or tools, with marks in their texts."""
    if isinstance(value, str):
        # The longest first: one special token may begin as another.
        return _pattern(tuple(marks)).sub(lambda match: marks[match[0]], value)
    if isinstance(value, Mapping):
        return {marked(key, marks): marked(inner, marks) for key, inner in value.items()}
    return [marked(inner, marks) for inner in value] if isinstance(value, list | tuple) else value


def strings(value: Any) -> Iterator[str]:
    """Yields every text in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def encode_renderings(tokenizer: PreTrainedTokenizerBase, renderings: Sequence[Rendering]) -> list[list[int]]:
    """Returns token ids of each, as the tokenizer gives them where there are no marks.

    Raises:
        DataError: a text has a special token, and the tokenizer cannot write it as text.
    """
    plain = [one.marked for one in renderings if not one.marks]
    ordinary = iter(tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else [])
    return [_encode_marked(tokenizer, one) if one.marks else next(ordinary) for one in renderings]


def encode_as_text(tokenizer: PreTrainedTokenizerBase, text: str, *, where: str) -> list[int]:
    """Returns token ids of a text in which special tokens are text.

    Raises:
        DataError: the tokenizer has no other token for one of them.
    """
    special = special_tokens(tokenizer)
    present = [token for token in special if token in text]
    if not present:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for token in present:
        if special[token] in ids:
            raise DataError(
                f"{where}: expected text, found the special token {token!r}, which the tokenizer cannot write as text; "
                f"{REMEDY}"
            )
    return ids


def _encode_marked(tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> list[int]:
    neutral = rendering.with_marks_as(rendering.marked, NEUTRAL)
    if _cut_and_encode(tokenizer, neutral, rendering) != tokenizer(neutral, add_special_tokens=False)["input_ids"]:
        raise DataError(
            f"{rendering.where}: expected text, found the special token {next(iter(rendering.marks.values()))!r}, and "
            f"the tokenizer does not read a text in the pieces between its special tokens; {REMEDY}"
        )
    return _cut_and_encode(tokenizer, rendering.marked, rendering)


def _cut_and_encode(tokenizer: PreTrainedTokenizerBase, text: str, rendering: Rendering) -> list[int]:
    special = special_tokens(tokenizer)
    ids: list[int] = []
    # A pattern with one group gives the special tokens in the places with odd indices.
    for index, piece in enumerate(_pattern(tuple(special)).split(text)):
        if index % 2:
            ids.append(special[piece])
        elif piece:
            ids += encode_as_text(tokenizer, rendering.with_marks_as(piece), where=rendering.where)
    return ids


@cache
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, tokens)) + ")")
