"""Cursor: deals the items of a dataset so that each comes exactly once per epoch, whatever crashes and resumes."""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from rlframe.data.config import DataConfig
from rlframe.data.storage.sequences import Joined
from rlframe.utils.errors import DataError

Item = TypeVar("Item")
logger = logging.getLogger(__name__)


class Walk(Protocol[Item]):
    """Deals items endlessly, and has a position that can be saved."""

    def __len__(self) -> int: ...

    def first(self, count: int) -> list[Item]: ...

    @property
    def epoch(self) -> int: ...

    @property
    def last_epoch(self) -> int: ...

    def next(self, count: int) -> list[Item]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Cursor(Generic[Item]):
    """An endless, resumable walk over items.

    The order of an epoch is the items sorted by sha256 of (seed, epoch, id). It depends on no library's generator, so a
    checkpoint survives upgrades.
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        ids: Sequence[str],
        tokens: Sequence[ArrayLike],
        seed: int,
        shuffle: bool,
        numbers: Sequence[float] | None = None,
    ):
        """Starts at the first item of epoch 0.

        Args:
            items: items to deal, with an entry of ids and tokens for each.
            tokens: tokens of each item; with the ids, they make the dataset's fingerprint.
            numbers: numbers by which an epoch deals the items, the smallest first. None deals them in one order.

        Raises:
            DataError: two items have one id.
        """
        assert len(items) == len(ids) == len(tokens) > 0
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise DataError(
                f"expected each item to have an id of its own, found {twice!r:.80} twice: several items of one record "
                "have its id and a suffix, and another record has such an id; give that record another"
            )
        self._items = items
        self._ids = ids
        self._seed = seed
        self._shuffle = shuffle
        self._numbers = numbers
        self._fingerprint = fingerprint(ids, tokens)
        if numbers is not None:
            self._fingerprint = fingerprint([self._fingerprint, *map(repr, numbers)], [()] * (len(numbers) + 1))
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._items)

    def first(self, count: int) -> list[Item]:
        """Returns at most `count` items from the beginning of the dataset, the same ones every time; nothing is
        dealt."""
        return list(self._items[:count])

    @property
    def epoch(self) -> int:
        """Epoch of the item dealt last, from 0."""
        return self._epoch

    @property
    def last_epoch(self) -> int:
        """Epoch of the item dealt last within its own dataset, from 0."""
        return self._epoch

    def next(self, count: int) -> list[Item]:
        """Deals the next `count` items, going on into the following epochs where one ends."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        dealt: list[Item] = []
        while len(dealt) < count:
            if self._position == len(self._items):
                self._begin_epoch(self._epoch + 1)
            taken = self._order[self._position : self._position + count - len(dealt)]
            dealt += [self._items[index] for index in taken]
            self._position += len(taken)
        return dealt

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._items),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`. The next item is the one that would have come then.

        Raises:
            DataError: the data, the seed or the shuffling is not that of `state`, so prompts would be lost or repeated.
        """
        names = {
            "size": "the number of items after filtering",
            "fingerprint": "the fingerprint of ids and tokens (records, chat template, tokenizer or system prompt)",
            "seed": "the seed",
            "shuffle": "data.shuffle",
        }
        check_same(state, self.state(), names)
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._order_of(self._epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = order_of(self._ids, self._seed, epoch) if self._shuffle else list(range(len(self._items)))
        # Items of the same number keep their order.
        return order if self._numbers is None else sorted(order, key=self._numbers.__getitem__)


class Mixture(Generic[Item]):
    """Several streams, each with its own epochs, dealt in fixed shares.

    The next item comes from the stream that is furthest behind its share of what was dealt, the earlier one of equals.
    After any number of items each stream has had its share to within one item (for two streams), and the numbers of
    dealt items are the whole state. Items that are passed over do not count.
    """

    def __init__(self, streams: Sequence[Walk[Item]], *, weights: Sequence[float]):
        assert len(streams) == len(weights) > 0
        self._streams = streams
        self._shares = [weight / sum(weights) for weight in weights]
        self._dealt = [0] * len(streams)
        self._last = 0

    def __len__(self) -> int:
        return sum(map(len, self._streams))

    def first(self, count: int) -> list[Item]:
        """Returns at most `count` items from the beginnings of the datasets, the same ones every time; nothing is
        dealt."""
        return [item for stream in self._streams for item in stream.first(count)][:count]

    @property
    def epoch(self) -> int:
        """The least of the streams' epochs: the number of times that everything has been seen."""
        return min(stream.epoch for stream in self._streams)

    @property
    def last_epoch(self) -> int:
        """Epoch of the item dealt last within its own dataset, from 0."""
        return self._streams[self._last].last_epoch

    def next(self, count: int) -> list[Item]:
        """Deals the next `count` items."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        dealt: list[Item] = []
        for _ in range(count):
            total = sum(self._dealt) + 1
            behind = [share * total - so_far for share, so_far in zip(self._shares, self._dealt, strict=True)]
            chosen = behind.index(max(behind))
            self._dealt[chosen] += 1
            self._last = chosen
            dealt += self._streams[chosen].next(1)
        return dealt

    def pass_over(self) -> None:
        """Takes the item dealt last from what its stream has had of its share."""
        self._dealt[self._last] -= 1

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, as plain JSON values."""
        return {
            "shares": list(self._shares),
            "dealt": list(self._dealt),
            "streams": [stream.state() for stream in self._streams],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`.

        Raises:
            DataError: the datasets, their weights, the seed or the shuffling are not those of `state`.
        """
        if state.get("shares") != self._shares:
            raise DataError(
                f"the data is not that of the checkpoint: the shares of data.path were {state.get('shares', 'none')} "
                f"and are now {self._shares}. Resume with the data and settings the run began with, or start a new run"
            )
        for stream, own in zip(self._streams, state["streams"], strict=True):
            stream.restore(own)
        self._dealt = list(state["dealt"])


def cursor_over(
    parts: Sequence[Sequence[Item]],
    *,
    ids: Sequence[Sequence[str]],
    tokens: Sequence[Sequence[ArrayLike]],
    seed: int,
    shuffle: bool,
    weights: Sequence[float] | None,
) -> Walk[Item]:
    """Returns a walk over the items of several datasets: over all as one, or, with `weights`, in shares."""
    if weights is None:
        return Cursor(
            Joined(parts),
            ids=[identity for part in ids for identity in part],
            tokens=Joined(tokens),
            seed=seed,
            shuffle=shuffle,
        )
    streams = [
        Cursor(part, ids=ids[index], tokens=tokens[index], seed=seed, shuffle=shuffle)
        for index, part in enumerate(parts)
    ]
    return Mixture(streams, weights=weights)


def tell_of_repeats(items: Sized, config: DataConfig, *, prompts_per_step: int) -> None:
    """Warns if a step takes more items than there are. Of a streamed dataset nobody knows."""
    if not config.streaming and len(items) < prompts_per_step:
        logger.warning(
            "prompts_per_step=%d is more than the %d that %s has to train on: a step takes some several times, as of "
            "further epochs", prompts_per_step, len(items), config.what,
        )  # fmt: skip


def order_of(ids: Sequence[str], seed: int, epoch: int) -> list[int]:
    """Returns the indices of `ids` in the order of an epoch."""
    prefix = f"{seed}:{epoch}:"
    return sorted(range(len(ids)), key=lambda index: hashlib.sha256((prefix + ids[index]).encode()).digest())


def fingerprint(ids: Sequence[str], tokens: Sequence[ArrayLike]) -> str:
    """Returns 16 hex digits that other ids, tokens or another order would change."""
    digest = hashlib.sha256()
    for identity, row in zip(ids, tokens, strict=True):
        tokens_of_item = np.asarray(row, dtype=np.int64)
        digest.update(f"{identity}\x00{len(tokens_of_item)}\x00".encode())
        digest.update(tokens_of_item.tobytes())
    return digest.hexdigest()[:16]


def check_same(state: Mapping[str, Any], mine: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Checks that the data of a checkpoint's `state` is what `mine` says of it.

    Args:
        names: what is compared, with words for it.

    Raises:
        DataError: something differs.
    """
    for key, name in names.items():
        if state.get(key) != mine[key]:
            raise DataError(
                f"the data is not that of the checkpoint: {name} was {state.get(key)} and is now {mine[key]}. "
                "Resume with the data and settings the run began with, or start a new run"
            )
