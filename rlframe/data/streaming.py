"""Flow: deals the items of datasets that are read as they are needed, and never held as a whole."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import ArrayLike

from rlframe.data import builtin
from rlframe.data.config import DataConfig
from rlframe.data.cursor import Mixture, Walk, check_same, fingerprint, order_of
from rlframe.data.records import Record, iterate
from rlframe.data.sources import Understand, from_evaluation_path
from rlframe.utils.errors import DataError

Placed = tuple[int, Record]
"""A record, and the index of the entry of `data.path` that it comes from."""


class Named(Protocol):
    """Something with an id: an item of offline training, or a prompt."""

    @property
    def id(self) -> str: ...


Streamed = TypeVar("Streamed", bound=Named)
Make = Callable[[Sequence[Record], int], list[Streamed]]
"""Function that makes the items of records of one entry, packed together if their kind is."""
Tokens = Callable[[Streamed], ArrayLike]
"""Function that returns the tokens of an item; with the ids, they make a window's fingerprint."""


class Flow(Generic[Streamed]):
    """An endless, resumable walk over records as they are read, window by window.

    A window is the next `size` records. Their items are made together, dealt in the order of sha256 of (seed, epoch,
    id), and forgotten: no record leaves its window. So three numbers say where the walk stands, and to go there the
    records of one window are read again. Where all records fit one window, `Cursor` would deal them in the same order.
    """

    def __init__(
        self,
        records: Callable[[], Iterator[Placed]],
        *,
        make: Make[Streamed],
        tokens: Tokens[Streamed],
        size: int,
        seed: int,
        shuffle: bool,
    ):
        """Reads the first window.

        Args:
            records: starts an epoch; returns the same records in the same order each time.
        """
        self._records, self._make, self._tokens = records, make, tokens
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._begin(epoch=0)
        self._advance()

    def __len__(self) -> int:
        """Returns items of the window at hand: how many there are in all is not known."""
        return len(self._items)

    def first(self, count: int) -> list[Streamed]:
        """Returns at most `count` items of the window at hand; nothing is dealt."""
        return self._items[:count]

    @property
    def epoch(self) -> int:
        """Epoch of the item dealt last, from 0."""
        return self._epoch

    @property
    def last_epoch(self) -> int:
        """Epoch of the item dealt last within its own dataset, from 0."""
        return self._epoch

    def next(self, count: int) -> list[Streamed]:
        """Deals the next `count` items, going on into the following windows and epochs. Raises DataError as reading
        does."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        dealt: list[Streamed] = []
        while len(dealt) < count:
            if self._position == len(self._items):
                self._advance()
            taken = self._items[self._position : self._position + count - len(dealt)]
            dealt += taken
            self._position += len(taken)
        return dealt

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "start": self._start,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "shuffle_buffer": self._size,
            "fingerprint": fingerprint([item.id for item in self._items], [self._tokens(item) for item in self._items]),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`. The next item is the one that would have come then.

        Raises:
            DataError: the records of that window, the tokenizer or the settings are not those of `state`.
        """
        self._begin(epoch=state["epoch"])
        # To read past the records before the window is all that it costs.
        self._end = sum(1 for _ in islice(self._reader, state.get("start", 0)))
        self._read()
        names = {
            "seed": "the seed",
            "shuffle": "data.shuffle",
            "shuffle_buffer": "data.shuffle_buffer",
            "start": "the number of records before the window",
            "fingerprint": "the fingerprint of its ids and tokens (records, chat template, tokenizer or system prompt)",
        }
        check_same(state, self.state(), names)
        self._position = state["position"]

    def _begin(self, *, epoch: int) -> None:
        self._epoch, self._reader = epoch, self._records()
        self._start = self._end = self._position = 0
        self._items: list[Streamed] = []
        self._fruitless = True

    def _advance(self) -> None:
        """Moves to the next window that has items, in the next epoch if this one has none."""
        while not (self._read() and self._items):
            if self._start < self._end:
                continue
            if self._fruitless:
                raise DataError("expected records to train on, found none that can be used in the whole of the data")
            self._begin(epoch=self._epoch + 1)

    def _read(self) -> bool:
        """Makes the next window. Returns False if no record is left."""
        placed = list(islice(self._reader, self._size))
        self._start, self._end, self._position = self._end, self._end + len(placed), 0
        items: list[Streamed] = []
        for channel, group in groupby(placed, key=lambda one: one[0]):
            items += self._make([record for _, record in group], channel)
        if self._shuffle:
            items = [items[index] for index in order_of([item.id for item in items], self._seed, self._epoch)]
        self._items = items
        self._fruitless = self._fruitless and not items
        return bool(placed)


def flow_over(config: DataConfig, *, make: Make[Streamed], tokens: Tokens[Streamed], seed: int) -> Walk[Streamed]:
    """Returns a walk over `data.path`: one dataset after the other, or, with weights, each by itself in its share."""
    channels = range(len(config.entries()))
    parts = [[channel] for channel in channels] if config.weights else [list(channels)]
    flows = [
        Flow(
            partial(records, config, part),
            make=make,
            tokens=tokens,
            size=config.shuffle_buffer,
            seed=seed,
            shuffle=config.shuffle,
        )
        for part in parts
    ]
    return Mixture(flows, weights=config.weights) if config.weights else flows[0]


def records(config: DataConfig, channels: Sequence[int]) -> Iterator[Placed]:
    """Returns the records of some entries of `data.path`, one entry after the other, read as they are asked for."""
    return chain.from_iterable(_entry(config, channel) for channel in channels)


def check_beginning(config: DataConfig, understand: Understand[Any]) -> list[Any]:
    """Returns the readings of the first window of each dataset; reads all that is held out too. Raises DataError."""
    from_evaluation_path(config, understand, Counter())
    return [
        understand(record, config)
        for channel in range(len(config.entries()))
        for _, record in islice(_entry(config, channel), config.shuffle_buffer)
    ]


def _entry(config: DataConfig, channel: int) -> Iterator[Placed]:
    entry = config.entries()[channel]
    namespace = entry.name if len(config.entries()) > 1 else ""
    if builtin.has(entry.path):
        found = iter(builtin.records(entry.path, builtin.Split.TRAIN))
    else:
        found = iterate(entry.path, max_bytes=config.max_record_bytes, streaming=True)
    for record in found:
        yield channel, replace(record, namespace=namespace)
