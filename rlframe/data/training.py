"""TrainingStream: what a kind of data for offline training is, from readings of records to packed batches."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Generic

import numpy as np
import torch
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from rlframe.data import cache
from rlframe.data.config import DataConfig
from rlframe.data.cursor import Cursor, cursor_over
from rlframe.data.items import AnyItem, Item
from rlframe.data.records import Record
from rlframe.data.sources import Reading, load
from rlframe.types.batch import Sequences
from rlframe.types.supervised import Examples
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)


class TrainingStream(ABC, Generic[AnyItem]):
    """Items to train on, each exactly once per epoch, and those held out. A file of `rlframe.data.kinds` has one."""

    unit: str
    """What one item is, for messages."""
    item: type[AnyItem]
    """The dataclass of its items."""
    settings: frozenset[str] = frozenset()
    """The fields of DataConfig that this kind looks at, of those that not every kind does."""

    def __init__(self, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, max_tokens: int):
        """Reads, renders and tokenises the whole dataset.

        Args:
            max_tokens: items with more are dropped and counted.

        Raises:
            DataError: a source that is missing, empty or malformed, a record that this kind of data cannot be made of,
                a chat template that rewrites earlier turns, or no item short enough.
        """
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, max_tokens
        self.channels = config.channels()
        """Names of the datasets that items come from."""
        self.dropped: Counter[str] = Counter()
        """Records and items left out, by reason."""
        file = cache.cache_file(config, kind=type(self).__name__, tokenizer=tokenizer, seed=seed, max_tokens=max_tokens)
        made = cache.read(file, self.item) if file else None
        if made is None:
            made = self._make_all(seed)
            if file:
                cache.write(file, made)
        else:
            logger.info("tokenised items from %s", file)
        self.dropped.update(made.dropped)
        self.recall(made.notes)
        train, self._held_out = made.train, made.held_out
        self._cursor: Cursor[AnyItem] = cursor_over(
            train,
            ids=[[item.id for item in part] for part in train],
            tokens=[[tokens_of(item) for item in part] for part in train],
            seed=seed,
            shuffle=config.shuffle,
            weights=config.weights,
        )
        if classes := self.classes():
            logger.info("classes: %s", classes)
        logger.info(
            "%s: %d of kind %s to train on, %d held out, dropped: %s",
            config.what, len(self), self.unit, len(self._held_out), dict(self.dropped) or "none",
        )  # fmt: skip

    @staticmethod
    @abstractmethod
    def understand(record: Record, config: DataConfig) -> Reading:
        """What the record says, before any tokenizer. Raises DataError naming record and field."""

    def notes(self, readings: Iterable[Any]) -> dict[str, Any]:
        """What must be known of all readings before items are made, as plain JSON values."""
        return {}

    def recall(self, notes: dict[str, Any]) -> None:
        """Makes `notes` known to this stream."""

    def make(self, readings: Sequence[Any], channel: int) -> list[AnyItem]:
        """The items of all readings from the entry `channel`, in their order."""
        return [item for reading in readings for item in self.items(reading, channel)]

    @abstractmethod
    def items(self, reading: Any, channel: int) -> list[AnyItem]:
        """The items a reading from the entry `channel` makes, of any length; counts in `dropped` what it leaves out."""

    def size(self, item: AnyItem) -> int:
        """Tokens of what must lie in one forward pass."""
        return item.num_tokens

    @abstractmethod
    def batch(self, items: list[AnyItem]) -> Sequences:
        """The items packed to one batch, in their order."""

    def classes(self) -> str:
        """The classes that items are labelled with, for people; empty where there are none."""
        return ""

    def titles(self, item: AnyItem) -> list[str]:
        """What each part of the item is, for people."""
        return [""] * len(item.parts)

    def __len__(self) -> int:
        return len(self._cursor)

    def next(self, count: int) -> list[AnyItem]:
        """The next `count` items, going on into the following epochs where one ends."""
        return self._cursor.next(count)

    def first(self, count: int) -> list[AnyItem]:
        """At most `count` items from the beginning of the dataset, the same ones every time; nothing is dealt."""
        return self._cursor.first(count)

    def held_out(self) -> list[AnyItem]:
        """Items never dealt by `next`: the same ones in the same order for every seed."""
        return list(self._held_out)

    @property
    def epoch(self) -> int:
        """Epoch of the item dealt last, from 0."""
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as plain JSON values."""
        return self._cursor.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken. Raises DataError if that was in other data or with another seed."""
        self._cursor.restore(state)

    def _make_all(self, seed: int) -> cache.Made[AnyItem]:
        """The items of the whole dataset."""
        found = load(self.config, seed=seed, understand=self.understand)
        notes = self.notes(reading for part in (*found.train, *found.held_out) for reading in part)
        self.recall(notes)
        train = [self._fitting(part, channel) for channel, part in enumerate(found.train)]
        why = f"held-out {self.unit} is too long"
        held_out = [
            item for channel, part in enumerate(found.held_out) for item in self._fitting(part, channel, why=why)
        ]
        dropped, self.dropped = found.dropped + self.dropped, Counter()
        return cache.Made(train=train, held_out=held_out, dropped=dict(dropped), notes=notes)

    def _fitting(self, readings: Sequence[Reading], channel: int, *, why: str = "") -> list[AnyItem]:
        """The items of `readings` that are short enough; the others are counted."""
        made = self.make(readings, channel)
        kept = [item for item in made if self.size(item) <= self.max_tokens]
        if too_long := len(made) - len(kept):
            self.dropped[why or f"{self.unit} is too long"] += too_long
        if not kept and not why:
            shortest = f"the shortest has {min(map(self.size, made))}" if made else "none were made at all"
            raise DataError(
                f"{self.config.what}: expected items of at most {self.max_tokens} tokens "
                f"(train.max_tokens_per_microbatch), one {self.unit} each, found none; {shortest}; dropped: "
                f"{dict(self.dropped)}"
            )
        return kept


def tokens_of(item: Item) -> Int32[np.ndarray, " T"]:
    """[T] the tokens of all parts, one after the other."""
    return np.concatenate([part.token_ids for part in item.parts])


def packed(items: Sequence[Item]) -> dict[str, torch.Tensor]:
    """The fields of `Sequences` for all parts of all items: R sequences of T tokens together."""
    parts = [part for item in items for part in item.parts]
    weights = torch.from_numpy(np.concatenate([part.weights for part in parts]))
    return {
        "token_ids": torch.from_numpy(np.concatenate([part.token_ids for part in parts])).long(),
        "lengths": torch.tensor([len(part.token_ids) for part in parts], dtype=torch.int64),
        "loss_mask": weights > 0,
    }


def examples_of(items: Sequence[Item], channels: tuple[str, ...]) -> Examples:
    """R sequences packed to T tokens, each with its weights and its channel."""
    parts = [part for item in items for part in item.parts]
    return Examples(
        **packed(items),
        importance=torch.from_numpy(np.concatenate([part.weights for part in parts])),
        channel=torch.tensor([item.channel for item in items for _ in item.parts]),
        channels=channels,
    )
