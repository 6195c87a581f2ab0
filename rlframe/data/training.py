"""TrainingSource: what a kind of data for offline training is, from readings of records to packed batches."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic

import numpy as np
import torch

from rlframe.data import cache
from rlframe.data.config import DataConfig
from rlframe.data.cursor import Walk, cursor_over
from rlframe.data.items import AnyItem, Item, tokens_of
from rlframe.data.parallel import T, Work, X, in_chunks, num_processes
from rlframe.data.records import Record
from rlframe.data.sources import Reading, at_most, from_evaluation_path, load
from rlframe.data.streaming import flow_over
from rlframe.data.text.turns import Encoded
from rlframe.types.batch import Sequences
from rlframe.types.supervised import Examples
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)
GIGABYTE = 1e9
REWRITTEN, SEQUENCES = "data/rewritten_conversations", "data/rewritten_sequences"
"""Metrics: conversations whose earlier turns the chat template rewrites, and the sequences that they became."""
ITEMS = ("_cursor", "_held_out", "_held_out_texts")
"""Attributes of a TrainingSource that hold its items."""
LEFT_OUT = "data/reasoning_left_out"
"""Metric: turns that are not learned and whose reasoning the chat template leaves out."""


class TrainingSource(ABC, Generic[AnyItem]):
    """Items to train on, each exactly once per epoch, and those held out. A file of `rlframe.data.kinds` has one."""

    unit: str
    """Name of an item, for messages."""
    item: type[AnyItem]
    """The dataclass of its items."""
    settings: frozenset[str] = frozenset()
    """Fields of DataConfig that this kind uses, among those that not every kind uses."""
    sequences_per_item: int = 1
    """Sequences of most items. Preflight counts them."""

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        max_tokens: int,
        max_positions: int | None = None,
    ):
        """Reads, renders and tokenises the whole dataset, or of a streamed one the first window.

        Args:
            max_tokens: items with more are dropped and counted.
            max_positions: items with a longer sequence are dropped and counted too: a model with rotary positions would
                train on them silently. None means no limit.

        Raises:
            DataError: a source is missing, empty or malformed, a record does not fit this kind of data, a chat template
                rewrites earlier turns, or no item is short enough.
        """
        self.config, self.tokenizer, self.max_tokens = config, tokenizer, max_tokens
        self.max_positions = max_positions
        self.channels = config.channels()
        """Names of the datasets that items come from."""
        self.dropped: Counter[str] = Counter()
        """Records and items left out, by reason. For a streamed dataset so far."""
        self.counted: Counter[str] = Counter()
        """Counts of what the chat template does to conversations, by metric; none is there without a cause. For a
        streamed dataset so far."""
        self._told: set[str] = set()
        self._cursor: Walk[AnyItem]
        self._held_out: list[AnyItem]
        if config.streaming:
            self._stream(seed)
        else:
            self._load(seed)
        if classes := self.classes():
            logger.info("classes: %s", classes)
        among = " in the first window" if config.streaming else ""
        logger.info(
            "%s: %d of kind %s to train on%s, %d held out", config.what, len(self), self.unit, among,
            len(self._held_out),
        )  # fmt: skip
        self._tell()

    @staticmethod
    @abstractmethod
    def understand(record: Record, config: DataConfig) -> Reading:
        """Returns what the record says, before any tokenizer. Raises DataError naming record and field."""

    def notes(self, readings: Iterable[Any]) -> dict[str, Any]:
        """Returns what must be known of all readings before items are made, as plain JSON values."""
        return {}

    def recall(self, notes: dict[str, Any]) -> None:
        """Restores `notes` in this stream."""

    def make(self, readings: Sequence[Any], channel: int) -> list[AnyItem]:
        """Returns the items of all readings from the entry `channel`, in their order."""
        before, items = (self.dropped, self.counted), []
        for made, dropped, counted in self.spread(partial(self._made, channel=channel), readings):
            items += made
            before[0].update(dropped)
            before[1].update(counted)
        self.dropped, self.counted = before
        return items

    def _made(self, readings: Sequence[Any], *, channel: int) -> tuple[list[AnyItem], Counter[str], Counter[str]]:
        """Returns the items of some readings, what they drop and what they count."""
        self.dropped, self.counted = Counter(), Counter()
        made = [item for reading in readings for item in self.items(reading, channel)]
        return made, self.dropped, self.counted

    def spread(self, work: Work[X, T], readings: Sequence[X]) -> Iterator[T]:
        """Yields what `work` returns for each chunk of the readings, in their order, from `data.num_processes`."""
        return in_chunks(work, readings, processes=num_processes(self.config.num_processes, len(readings)))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what other processes need to make items: all but the items that there are."""
        return {name: value for name, value in vars(self).items() if name not in ITEMS}

    @abstractmethod
    def items(self, reading: Any, channel: int) -> list[AnyItem]:
        """Returns the items a reading from the entry `channel` makes, of any length; counts in `dropped` what it leaves
        out."""

    def size(self, item: AnyItem) -> int:
        """Returns tokens of what must lie in one forward pass."""
        return item.num_tokens

    @abstractmethod
    def batch(self, items: list[AnyItem]) -> Sequences:
        """Returns the items packed to one batch, in their order."""

    def classes(self) -> str:
        """Returns the classes that items are labelled with, for people; empty where there are none."""
        return ""

    def titles(self, item: AnyItem) -> list[str]:
        """Returns what each part of the item is, for people."""
        return [""] * len(item.parts)

    def __len__(self) -> int:
        """Returns items in an epoch; of a streamed dataset, where that is not known, those at hand: of the first window
        until more are dealt."""
        return len(self._cursor)

    def count(self, encoded: Encoded) -> None:
        """Counts what the chat template does to a conversation."""
        if (several := len(encoded.sequences)) > 1:
            self.counted += Counter({REWRITTEN: 1, SEQUENCES: several})
        if encoded.reasoning_left_out:
            self.counted[LEFT_OUT] += encoded.reasoning_left_out

    def metrics(self) -> dict[str, float]:
        """Returns how many records and items are left out, and what the chat template does to conversations."""
        counts = {"data/dropped": self.dropped.total(), **self.counted}
        return {name: float(count) for name, count in counts.items()}

    def next(self, count: int) -> list[AnyItem]:
        """Deals the next `count` items, going on into the following epochs where one ends."""
        return self._cursor.next(count)

    def first(self, count: int) -> list[AnyItem]:
        """Returns at most `count` items from the beginning of the dataset, of a streamed one from its window at hand;
        nothing is dealt."""
        return self._cursor.first(count)

    def of_an_epoch(self) -> list[AnyItem]:
        """Returns as many items as there are, as training sees them: those of datasets with weights in their shares.
        Nothing is dealt. Of a streamed dataset they are those at hand."""
        if self.config.streaming or self.config.weights is None:
            return self.first(len(self))
        before = self.state()
        items = self.next(len(self))
        self.restore(before)
        return items

    def held_out(self) -> list[AnyItem]:
        """Returns items never dealt by `next`: the same ones in the same order for every seed."""
        return list(self._held_out)

    @property
    def epoch(self) -> int:
        """Epoch of the item dealt last, from 0."""
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, as plain JSON values."""
        counts = {"dropped": dict(self.dropped), "counted": dict(self.counted)} if self.config.streaming else {}
        return self._cursor.state() | counts

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`. Raises DataError if it belongs to other data or another seed."""
        self._cursor.restore(state)
        if self.config.streaming:
            self.dropped, self.counted = Counter(state["dropped"]), Counter(state.get("counted", {}))

    def _load(self, seed: int) -> None:
        """Takes all items from the cache if they are there."""
        config, kind = self.config, type(self).__name__
        limits = {"max_tokens": self.max_tokens, "max_positions": self.max_positions}
        file = cache.cache_file(config, kind=kind, tokenizer=self.tokenizer, seed=seed, **limits)
        made = cache.read(file, self.item) if file else None
        if made is None:
            made = self._make_all(seed)
            if file:
                cache.write(file, made, most_bytes=config.cache_gb * GIGABYTE)
        else:
            logger.info("tokenised items from %s", file)
        self.dropped.update(made.dropped)
        self.counted.update(made.counted)
        self.recall(made.notes)
        self._held_out = made.held_out
        self._cursor = cursor_over(
            made.train,
            ids=[[item.id for item in part] for part in made.train],
            tokens=[[tokens_of(item) for item in part] for part in made.train],
            seed=seed,
            shuffle=config.shuffle,
            weights=config.weights,
        )

    def _stream(self, seed: int) -> None:
        """Reads what is held out, and the beginning of the rest."""
        held_out = from_evaluation_path(self.config, self.understand, self.dropped)
        held_out = at_most(self.config.evaluation_count, held_out)
        self.recall(self.notes(reading for part in held_out for reading in part))
        self._held_out = self._fitting_held_out(held_out)
        self._held_out_texts = {reading.prompt_text for part in held_out for reading in part}
        self._cursor = flow_over(self.config, make=self._window, tokens=tokens_of, seed=seed)

    def _window(self, records: Sequence[Record], channel: int) -> list[AnyItem]:
        """Returns the items of streamed records."""
        readings = [self.understand(record, self.config) for record in records]
        kept = [reading for reading in readings if reading.prompt_text not in self._held_out_texts]
        if leaked := len(readings) - len(kept):
            self.dropped["prompt is held out"] += leaked
        items = self._fitting(self.make(kept, channel))
        self._tell()
        return items

    def _make_all(self, seed: int) -> cache.Made[AnyItem]:
        """Returns the items of the whole dataset."""
        found = load(self.config, seed=seed, understand=self.understand)
        notes = self.notes(reading for part in (*found.train, *found.held_out) for reading in part)
        self.recall(notes)
        train: list[list[AnyItem]] = []
        for channel, part in enumerate(found.train):
            made = self.make(part, channel)
            train.append(self._fitting(made))
            if not train[-1]:
                shortest = f"the shortest has {min(map(self.size, made))}" if made else "none were made at all"
                raise DataError(
                    f"{self.config.what}: expected items of at most {self.max_tokens} tokens "
                    f"(train.max_tokens_per_microbatch){self._positions()} with a token to learn, one {self.unit} "
                    f"each, found none; {shortest}; dropped: {dict(self.dropped)}"
                )
        held_out = self._fitting_held_out(found.held_out)
        dropped, self.dropped = found.dropped + self.dropped, Counter()
        counted, self.counted = self.counted, Counter()
        return cache.Made(train=train, held_out=held_out, dropped=dict(dropped), counted=dict(counted), notes=notes)

    def _positions(self) -> str:
        return f" and of sequences within the model's {self.max_positions} positions" if self.max_positions else ""

    def _fitting_held_out(self, parts: Sequence[Sequence[Reading]]) -> list[AnyItem]:
        """Returns the items of what is held out, by channel."""
        made = [item for channel, part in enumerate(parts) for item in self.make(part, channel)]
        return self._fitting(made, what=f"held-out {self.unit}")

    def _fitting(self, made: Sequence[AnyItem], *, what: str = "") -> list[AnyItem]:
        """Returns those that can be trained on; the others are counted."""
        what = what or self.unit
        learnt = [item for item in made if all(part.weights.any() for part in item.parts)]
        # A sequence with an empty mask is one to every denominator, and nothing to any numerator.
        if empty := len(made) - len(learnt):
            self.dropped[f"{what} has no token to learn"] += empty
        short = [item for item in learnt if self.size(item) <= self.max_tokens]
        if too_long := len(learnt) - len(short):
            self.dropped[f"{what} is too long"] += too_long
        most = self.max_positions or self.max_tokens
        kept = [item for item in short if all(len(part.token_ids) <= most for part in item.parts)]
        if beyond := len(short) - len(kept):
            self.dropped[f"{what} has more tokens than the model has positions"] += beyond
        return kept

    def _tell(self) -> None:
        """Warns when something is left out for a reason that had none so far."""
        if new := {reason: count for reason, count in self.dropped.items() if reason not in self._told}:
            self._told |= set(new)
            logger.warning("%s: left out so far: %s; data/dropped counts them", self.config.what, new)
        if (split := self.counted[REWRITTEN]) and "rewritten" not in self._told:
            self._told.add("rewritten")
            logger.warning(
                "%s: the chat template rewrites earlier turns of %d conversations so far, which become %d sequences, "
                "as it serves them; %s and %s count them",
                self.config.what, split, self.counted[SEQUENCES], REWRITTEN, SEQUENCES,
            )  # fmt: skip
        if (left_out := self.counted[LEFT_OUT]) and "reasoning" not in self._told:
            self._told.add("reasoning")
            logger.warning(
                "%s: the chat template leaves out the reasoning of %d earlier turns so far, as when it serves the "
                "model; %s counts them",
                self.config.what, left_out, LEFT_OUT,
            )  # fmt: skip


def packed(items: Sequence[Item]) -> dict[str, torch.Tensor]:
    """Returns the fields of `Sequences` for all parts of all items: R sequences of T tokens together."""
    parts = [part for item in items for part in item.parts]
    weights = torch.from_numpy(np.concatenate([part.weights for part in parts]))
    return {
        "token_ids": torch.from_numpy(np.concatenate([part.token_ids for part in parts])).long(),
        "lengths": torch.tensor([len(part.token_ids) for part in parts], dtype=torch.int64),
        "loss_mask": weights > 0,
    }


def examples_of(items: Sequence[Item], channels: tuple[str, ...]) -> Examples:
    """Returns R sequences packed to T tokens, each with its weights and its channel."""
    parts = [part for item in items for part in item.parts]
    return Examples(
        **packed(items),
        importance=torch.from_numpy(np.concatenate([part.weights for part in parts])),
        channel=torch.tensor([item.channel for item in items for _ in item.parts]),
        channels=channels,
    )
