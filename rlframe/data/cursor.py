"""Stream: deals the items of a dataset so that each comes exactly once per epoch, whatever crashes and resumes."""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rlframe.types.batch import Sequences
from rlframe.utils.errors import DataError

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """An endless, resumable walk over items.

    The order of an epoch is the items sorted by sha256 of (seed, epoch, id): it depends on no library's generator, so
    that a checkpoint outlives upgrades.
    """

    def __init__(
        self, items: Sequence[Item], *, ids: Sequence[str], tokens: Sequence[Sequence[int]], seed: int, shuffle: bool
    ):
        """Starts at the first item of epoch 0.

        Args:
            items: what is dealt; ids and tokens stand beside them, one each.
            tokens: what the model will see of each item; with the ids, the dataset's fingerprint.
        """
        assert len(items) == len(ids) == len(tokens) == len(set(ids)) > 0
        self._items = items
        self._ids = ids
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(ids, tokens)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._items)

    def first(self, count: int) -> list[Item]:
        """At most `count` items from the beginning of the dataset, the same ones every time; nothing is dealt."""
        return list(self._items[:count])

    @property
    def epoch(self) -> int:
        """Epoch of the item dealt last, from 0."""
        return self._epoch

    def next(self, count: int) -> list[Item]:
        """The next `count` items, going on into the following epochs where one ends."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        dealt: list[Item] = []
        while len(dealt) < count:
            if self._position == len(self._items):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            taken = self._order[self._position : self._position + count - len(dealt)]
            dealt += [self._items[index] for index in taken]
            self._position += len(taken)
        return dealt

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._items),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken; the next item dealt is the one that would have come then.

        Raises:
            DataError: the data, the seed or the shuffling is not that of `state`, so prompts would be lost or repeated.
        """
        mine = self.state()
        names = {
            "size": "the number of items after filtering",
            "fingerprint": "the fingerprint of ids and tokens (records, chat template, tokenizer or system prompt)",
            "seed": "the seed",
            "shuffle": "data.shuffle",
        }
        for key, name in names.items():
            if state[key] != mine[key]:
                raise DataError(
                    f"the data is not that of the checkpoint: {name} was {state[key]} and is now {mine[key]}. "
                    "Resume with the data and settings the run began with, or start a new run"
                )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        indices = list(range(len(self._items)))
        if self._shuffle:
            prefix = f"{self._seed}:{epoch}:"
            indices.sort(key=lambda index: hashlib.sha256((prefix + self._ids[index]).encode()).digest())
        return indices


class TrainingStream(Stream[Item], ABC):
    """A kind of data that offline algorithms train on: a file of `rlframe.data.kinds`."""

    @abstractmethod
    def batch(self, items: list[Item]) -> Sequences:
        """The items packed to one batch, in their order."""


def _fingerprint(ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for identity, row in zip(ids, tokens, strict=True):
        digest.update(f"{identity}\x00{len(row)}\x00".encode())
        digest.update(array("q", row).tobytes())
    return digest.hexdigest()[:16]
