"""Items that a stream of offline training deals."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Int32

from rlframe.data.text.turns import Tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Item:
    """Sequences that belong together. A kind of data adds fields of its own."""

    id: str
    """Id that is unique in the dataset; in a streamed one, among the records it is made with."""
    parts: tuple[Tokens, ...]
    """The sequences, in the order a batch has them."""
    channel: int = 0
    """Index of the entry of `data.path` it came from."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all parts."""
        return sum(len(part.token_ids) for part in self.parts)


AnyItem = TypeVar("AnyItem", bound=Item)


def tokens_of(item: Item) -> Int32[np.ndarray, " T"]:
    """Returns [T] the tokens of all parts, one after the other."""
    return np.concatenate([part.token_ids for part in item.parts])
