"""Queries with a text each should be near to, and texts it should be far from: embeddings.

| shape | query | near | far |
|---|---|---|---|
| {query or anchor, positive, negative or negatives} | text | text, or a list: one item for each | text or a list |
| sentence-transformers {anchor, positive, negative_1, negative_2, ...} | text | text | texts |
| FlagEmbedding {query, pos, neg} | text | list: one item for each | list |
"""

import re
from dataclasses import dataclass
from functools import partial

import torch

from rlframe.data.config import DataConfig
from rlframe.data.items import Item
from rlframe.data.records import Record
from rlframe.data.text.documents import encode_text, text_field, text_list
from rlframe.data.training import TrainingSource, packed
from rlframe.types.messages import Message
from rlframe.types.supervised import Contrasted, Role
from rlframe.utils.errors import DataError

QUERY_KEYS = ("query", "anchor")
NEAR_KEYS = ("positive", "positives", "pos")
FAR_KEYS = ("negatives", "negative", "neg")
NUMBERED_FAR_KEY = re.compile(r"negative_(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contrast:
    """A record, parsed."""

    record: Record
    query: str
    near: tuple[str, ...]
    far: tuple[str, ...]

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
        """The query, for comparisons."""
        return self.query


class ContrastedSource(TrainingSource[Item]):
    """The parts of an item are the query, the text near to it, and the texts far from it."""

    unit = "query"
    item = Item
    sequences_per_item = 2

    @staticmethod
    def understand(record: Record, config: DataConfig) -> Contrast:
        """Returns the texts."""
        near = text_list(record, NEAR_KEYS)
        if not near:
            raise DataError(
                f"{record.where}: expected a text to be near to in {' or '.join(map(repr, NEAR_KEYS))}, found the "
                f"fields {record.names}"
            )
        return Contrast(record=record, query=text_field(record, QUERY_KEYS), near=near, far=far_texts(record))

    def items(self, reading: Contrast, channel: int) -> list[Item]:
        """Returns one for each text near to the query."""
        encode = partial(encode_text, tokenizer=self.tokenizer, config=self.config, where=reading.record.where)
        query, *far = (encode(text) for text in (reading.query, *reading.far))
        several = len(reading.near) > 1
        return [
            Item(
                id=f"{reading.id}#{index}" if several else reading.id,
                parts=(query, encode(near), *far),
                channel=channel,
            )
            for index, near in enumerate(reading.near)
        ]

    def size(self, item: Item) -> int:
        """Returns tokens of the longest text: texts meet in the loss, not in a forward pass."""
        return max(len(part.token_ids) for part in item.parts)

    def titles(self, item: Item) -> list[str]:
        """Returns the roles."""
        return ["query", "near to it", *["far from it"] * (len(item.parts) - 2)]

    def batch(self, items: list[Item]) -> Contrasted:
        """Returns all texts packed to T tokens, query by query."""
        roles = [[Role.QUERY, Role.POSITIVE] + [Role.NEGATIVE] * (len(item.parts) - 2) for item in items]
        return Contrasted(
            **packed(items),
            group=torch.tensor([index for index, item in enumerate(items) for _ in item.parts]),
            role=torch.tensor([int(role) for own in roles for role in own]),
        )


def far_texts(record: Record) -> tuple[str, ...]:
    """Returns the texts far from the query: those of the first of FAR_KEYS, and the numbered ones in their order."""
    numbered = filter(None, map(NUMBERED_FAR_KEY.fullmatch, record.fields))
    keys = [match[0] for match in sorted(numbered, key=lambda match: int(match[1]))]
    return tuple(text for own in (FAR_KEYS, *((key,) for key in keys)) for text in text_list(record, own))


SOURCE = ContrastedSource
