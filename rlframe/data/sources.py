"""The records of a run, understood, and cut into what it trains on and what it holds out."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from rlframe.data import arithmetic
from rlframe.data.config import DataConfig, Entry
from rlframe.data.conversations import Message
from rlframe.data.records import Record, read
from rlframe.utils.errors import DataError


class Reading(Protocol):
    """A record, understood: what `load` needs to know of it."""

    @property
    def id(self) -> str:
        """The record's."""
        ...

    @property
    def messages(self) -> Sequence[Message]:
        """Turns for the chat template; none where it has only texts."""
        ...

    @property
    def prompt_text(self) -> str:
        """What may not be held out and trained on at once, whoever else has it."""
        ...


R = TypeVar("R", bound=Reading)
Understand = Callable[[Record, DataConfig], R]
"""What makes a reading of a record, or raises DataError with a sentence that names record and field."""


@dataclass(kw_only=True, slots=True)
class Readings(Generic[R]):
    """What `load` found."""

    train: list[list[R]]
    """By entry of `data.path`, in the order of its files; no prompt of `held_out` is among them."""
    held_out: list[list[R]]
    """By `DataConfig.channels`; at most `evaluation_count` together, the same ones for every seed."""
    dropped: Counter[str]
    """Records left out, by reason."""


def load(config: DataConfig, *, seed: int, understand: Understand[R]) -> Readings[R]:
    """Reads `config.path`, holds records out, and drops what may not be trained on.

    Args:
        seed: decides which records a `#500` suffix keeps, nothing else.

    Raises:
        DataError: a source that is missing, empty or malformed, or one with nothing left to train on.
    """
    entries = config.entries()
    dropped: Counter[str] = Counter()
    several = len(entries) > 1
    train = [
        list(understood(entry.path, config, understand, dropped, namespace=entry.name if several else ""))
        for entry in entries
    ]
    held_out = from_evaluation_path(config, understand, dropped)
    if config.evaluation_path is None:
        ids = _ids_to_put_aside(entries, train, config.evaluation_count)
        for index, part in enumerate(train):
            held_out[index] = [reading for reading in part if reading.id in ids]
            train[index] = [reading for reading in part if reading.id not in ids]
        # The built-in datasets hold out the same problems.
        for index in [index for index, entry in enumerate(entries) if entry.path in arithmetic.NAMES][:1]:
            path = entries[index].path
            held_out[index] += understood(path, config, understand, dropped, part=arithmetic.Split.HELD_OUT)
    # An id is not enough: two files may number different records alike, or hold one prompt under two ids.
    prompts = {reading.prompt_text for part in held_out for reading in part}
    before = sum(map(len, train))
    train = [[reading for reading in part if reading.prompt_text not in prompts] for part in train]
    if leaked := before - sum(map(len, train)):
        dropped["prompt is held out"] = leaked
    for index, entry in enumerate(entries):
        if entry.count is not None:
            kept = {reading.id for reading in sort_by_hash(train[index], salt=f"subset {seed}")[: entry.count]}
            train[index] = [reading for reading in train[index] if reading.id in kept]
        if not train[index]:
            raise DataError(f"{entry.path}: expected records to train on, found none; dropped: {dict(dropped)}")
    return Readings(train=train, held_out=at_most(config.evaluation_count, held_out), dropped=dropped)


def from_evaluation_path(config: DataConfig, understand: Understand[R], dropped: Counter[str]) -> list[list[R]]:
    """The readings of `evaluation_path` by `DataConfig.channels`, none where it is null. Adds to `dropped`."""
    found: list[list[R]] = [[] for _ in config.channels()]
    if config.evaluation_path is not None:
        held_out = understood(config.evaluation_path, config, understand, dropped, part=arithmetic.Split.HELD_OUT)
        found[config.evaluation_channel] = list(held_out)
    return found


def at_most(count: int, held_out: list[list[R]]) -> list[list[R]]:
    """The first `count` of all by a hash of their ids, in that order within each part."""
    everything = sort_by_hash([reading for part in held_out for reading in part], salt="held out")
    kept = {reading.id for reading in everything[:count]}
    return [[reading for reading in sort_by_hash(part, salt="held out") if reading.id in kept] for part in held_out]


def understood(
    path: str,
    config: DataConfig,
    understand: Understand[R],
    dropped: Counter[str],
    *,
    namespace: str = "",
    part: arithmetic.Split = arithmetic.Split.TRAIN,
) -> Iterator[R]:
    """The readings of one dataset, in its order, each id once.

    Args:
        namespace: put before every id, so that several datasets may number their records alike.
        part: which of the built-in datasets.
    """
    seen: set[str] = set()
    for record in (
        arithmetic.records(path, part) if path in arithmetic.NAMES else read(path, max_bytes=config.max_record_bytes)
    ):
        reading = understand(replace(record, namespace=namespace), config)
        if reading.id in seen:
            dropped["duplicate id"] += 1
        else:
            seen.add(reading.id)
            yield reading


def _ids_to_put_aside(entries: list[Entry], train: list[list[R]], count: int) -> set[str]:
    """Of at most `count` readings and a tenth of those from files, by a hash of their ids."""
    own = [part for entry, part in zip(entries, train, strict=True) if entry.path not in arithmetic.NAMES]
    everything = [reading for part in own for reading in part]
    return {reading.id for reading in sort_by_hash(everything, salt="held out")[: min(count, len(everything) // 10)]}


def sort_by_hash(readings: Sequence[R], *, salt: str) -> list[R]:
    """A fixed pseudo-random order that depends on the ids and the salt alone."""
    return sorted(readings, key=lambda one: hashlib.sha256(f"{salt}:{one.id}".encode()).digest())
