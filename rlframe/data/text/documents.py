"""Texts without turns: documents, queries, and the texts compared with them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rlframe.data.config import DataConfig
from rlframe.data.records import Record
from rlframe.data.text.special_tokens import NEUTRAL, encode_as_text
from rlframe.data.text.turns import Tokens
from rlframe.types.messages import Message
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A record, parsed as one text."""

    record: Record
    text: str

    @property
    def id(self) -> str:
        """The id of the record."""
        return self.record.id

    @property
    def messages(self) -> tuple[Message, ...]:
        """None."""
        return ()

    @property
    def prompt_text(self) -> str:
        """The text, for comparisons."""
        return self.text


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token that ends a text. Raises DataError where the tokenizer has none."""
    token = tokenizer.eos_token_id
    if not isinstance(token, int):
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no eos_token, which must end each text; add one")
    return token


def last_token_counts(token_ids: list[int]) -> Tokens:
    """Returns the tokens with all weight on the last: the one whose state or value stands for the text."""
    weights = np.zeros(len(token_ids), dtype=np.float32)
    weights[-1] = 1.0
    return Tokens(token_ids=np.array(token_ids, dtype=np.int32), weights=weights)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, *, config: DataConfig, where: str) -> Tokens:
    """Returns the tokens of `document`, of which the last stands for the text."""
    return last_token_counts(document(text, tokenizer, config=config, where=where))


def document(text: str, tokenizer: PreTrainedTokenizerBase, *, config: DataConfig, where: str) -> list[int]:
    """Returns the tokens that the tokenizer puts before a text, those of the text, and the end-of-text token. Raises
    DataError naming `where` for a special token that cannot be text."""
    if config.special_tokens_in_text:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        own = encode_as_text(tokenizer, text, where=where)
    return [*beginning(tokenizer), *own, end_of_text(tokenizer)]


@cache
def beginning(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer puts before a text, as the model is served: those of Llama and Gemma put
    the beginning-of-text token there."""
    whole, own = (tokenizer(NEUTRAL, add_special_tokens=added)["input_ids"] for added in (True, False))
    starts = range(len(whole) - len(own) + 1)
    return tuple(whole[: next((start for start in starts if whole[start : start + len(own)] == own), 0)])


def text_field(record: Record, keys: tuple[str, ...], setting: str | None = None) -> str:
    """Returns the text in the first of the fields `keys` that the record has.

    Raises:
        DataError: the record has none of them, or the field is not text.
    """
    key = _key(record, keys, setting)
    value = record.fields[key]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{record.where}: expected {key!r} to be text, found {type(value).__name__} {value!r:.60}")
    return value


def text_list(record: Record, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the text or list of texts in the first of the fields `keys` that the record has; none where it has
    none."""
    key = record.first(keys)
    value: Any = record.fields[key] if key and record.has(key) else []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"{record.where}: expected {key!r} to be text or a list of texts, found {value!r:.60}")
    return tuple(texts)


def _key(record: Record, keys: tuple[str, ...], setting: str | None) -> str:
    key = record.first(keys)
    if key is None:
        hint = f"; name the field with {setting}" if setting else ""
        raise DataError(
            f"{record.where}: expected the field {' or '.join(map(repr, keys))}, found {record.names}{hint}"
        )
    return key
