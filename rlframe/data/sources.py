"""The parsed records of a run, divided into training and held-out records."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from rlframe.data import builtin
from rlframe.data.config import DataConfig, Entry
from rlframe.data.records import Record
from rlframe.data.storage.sequences import Joined, Lazy
from rlframe.data.storage.tables import records
from rlframe.types.messages import Message
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)

REPEATED = "duplicate id"
"""Reason of dropping a record that has come before."""


class Reading(Protocol):
    """The interface of a parsed record that `load` needs."""

    @property
    def id(self) -> str:
        """The id of the record."""
        ...

    @property
    def messages(self) -> Sequence[Message]:
        """Turns for the chat template. None if the record has only texts."""
        ...

    @property
    def prompt_text(self) -> str:
        """Text that must not be both held out and trained on."""
        ...


R = TypeVar("R", bound=Reading)
Understand = Callable[[Record, DataConfig], R]
"""Function that returns the reading of a record, or raises DataError with a sentence that names record and field."""


class Part(Generic[R]):
    """The readings of one dataset, with the data that decides which of them are kept."""

    def __init__(self, readings: Sequence[R], ids: list[str], prompts: list[bytes]):
        """Stores the readings.

        Args:
            readings: readings; made when they are requested if they are many.
            ids: id of each reading.
            prompts: the SHA-256 of each one's `prompt_text`.
        """
        assert len(readings) == len(ids) == len(prompts)
        self.readings, self.ids, self.prompts = readings, ids, prompts

    def __len__(self) -> int:
        return len(self.ids)

    def pick(self, places: Sequence[int]) -> "Part[R]":
        """Returns the readings at `places`, in that order."""
        if len(places) == len(self) and all(place == index for index, place in enumerate(places)):
            return self
        readings = self.readings
        few = isinstance(readings, list)
        return Part(
            [readings[place] for place in places] if few else Lazy(readings.__getitem__, places),
            [self.ids[place] for place in places],
            [self.prompts[place] for place in places],
        )

    def where(self, keep: Callable[[str, bytes], bool]) -> "Part[R]":
        """Returns the readings that `keep` accepts, given their id and the digest of their prompt."""
        pairs = zip(self.ids, self.prompts, strict=True)
        return self.pick([place for place, pair in enumerate(pairs) if keep(*pair)])

    def by_hash(self, salt: str) -> "Part[R]":
        """Returns the readings in a fixed pseudo-random order that depends only on the ids and the salt."""
        return self.pick(order_by_hash(self.ids, salt=salt))


@dataclass(kw_only=True, slots=True)
class Readings(Generic[R]):
    """The result of `load`."""

    train: list[Sequence[R]]
    """Readings by entry of `data.path`, in the order of its files. None has a prompt of `held_out`."""
    held_out: list[Sequence[R]]
    """Readings by `DataConfig.channels`: at most `evaluation_count` together, the same ones for every seed."""
    dropped: Counter[str]
    """Records left out, by reason."""


def load(config: DataConfig, *, seed: int, understand: Understand[R]) -> Readings[R]:
    """Reads `config.path`, holds records out, and drops records that must not be trained on.

    Args:
        seed: decides only which records a `#500` suffix keeps.

    Raises:
        DataError: a source is missing, empty or malformed, or has nothing left to train on.
    """
    entries = config.entries()
    dropped: Counter[str] = Counter()
    several = len(entries) > 1
    train = [
        understood(entry.path, config, understand, dropped, namespace=entry.name if several else "")
        for entry in entries
    ]
    held_out = from_evaluation_path(config, understand, dropped)
    if config.evaluation_path is None:
        _hold_out(config, train, held_out, understand, dropped)
    # An id is not enough: two files may number different records alike, or hold one prompt under two ids.
    prompts = {prompt for parts in held_out for part in parts for prompt in part.prompts}
    before = sum(map(len, train))
    train = [part.where(lambda _, prompt: prompt not in prompts) for part in train]
    if leaked := before - sum(map(len, train)):
        dropped["prompt is held out"] = leaked
    for index, entry in enumerate(entries):
        train[index] = counted(train[index], entry, salt=f"subset {seed}")
        if not train[index]:
            raise DataError(f"{entry.path}: expected records to train on, found none; dropped: {dict(dropped)}")
    kept = at_most(config.evaluation_count, held_out)
    return Readings(train=[part.readings for part in train], held_out=kept, dropped=dropped)


def counted(part: Part[R], entry: Entry, *, salt: str) -> Part[R]:
    """Returns the readings that a suffix `#500` keeps, or all. Warns where there are fewer."""
    if entry.count is None:
        return part
    if len(part) < entry.count:
        logger.warning("%s#%d: there are only %d records, which are all used", entry.path, entry.count, len(part))
    return part.pick(sorted(order_by_hash(part.ids, salt=salt)[: entry.count]))


def from_evaluation_path(config: DataConfig, understand: Understand[R], dropped: Counter[str]) -> list[list[Part[R]]]:
    """Returns the readings of `evaluation_path` by `DataConfig.channels`, or none if it is null. Adds to `dropped`."""
    found: list[list[Part[R]]] = [[] for _ in config.channels()]
    if config.evaluation_path is not None:
        held_out = understood(config.evaluation_path, config, understand, dropped, part=builtin.Split.HELD_OUT)
        found[config.evaluation_channel] = [held_out]
    return found


def _hold_out(
    config: DataConfig,
    train: list[Part[R]],
    held_out: list[list[Part[R]]],
    understand: Understand[R],
    dropped: Counter[str],
) -> None:
    """Moves readings of files from `train` to `held_out`, and adds the held-out problems of built-in datasets, of which
    `at_most` keeps the first. A reading of a file moves only if it is among those; it would be lost otherwise."""
    entries = config.entries()
    made: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if builtin.has(entry.path):
            # Most built-in datasets hold out the same problems.
            made.setdefault(builtin.held_out_problems(entry.path), index)
    for index in made.values():
        path, name = entries[index].path, entries[index].name
        # Two sets of one task of a package, whose names are their paths, number their problems alike.
        namespace = name if builtin.short_name(path) not in ("", name) else ""
        problems = understood(path, config, understand, dropped, namespace=namespace, part=builtin.Split.HELD_OUT)
        held_out[index].append(problems)
    put_aside = _ids_to_put_aside(entries, train, config.evaluation_count)
    others = [identity for parts in held_out for part in parts for identity in part.ids]
    put_aside &= _first_ids(config.evaluation_count, [*put_aside, *others])
    for index, part in enumerate(train):
        held_out[index].append(part.where(lambda identity, _: identity in put_aside))
        train[index] = part.where(lambda identity, _: identity not in put_aside)


def _first_ids(count: int, ids: Sequence[str]) -> set[str]:
    """Returns the first `count` ids by a hash of them."""
    return {ids[place] for place in order_by_hash(ids, salt="held out")[:count]}


def at_most(count: int, held_out: list[list[Part[R]]]) -> list[Sequence[R]]:
    """Returns the first `count` of all by a hash of their ids, in that order within each channel."""
    kept = _first_ids(count, [identity for parts in held_out for part in parts for identity in part.ids])
    chosen = []
    for parts in held_out:
        few = [part.where(lambda identity, _: identity in kept) for part in parts]
        own = [identity for part in few for identity in part.ids]
        readings = Joined([part.readings for part in few])
        chosen.append([readings[place] for place in order_by_hash(own, salt="held out")])
    return chosen


def understood(
    path: str,
    config: DataConfig,
    understand: Understand[R],
    dropped: Counter[str],
    *,
    namespace: str = "",
    part: builtin.Split = builtin.Split.TRAIN,
) -> Part[R]:
    """Returns the readings of one dataset, in its order, each record once. Adds to `dropped`.

    Args:
        namespace: prefix of every id, so that several datasets may number their records alike.
        part: which of the built-in datasets.
    """
    own_ids = builtin.has(path)
    found = builtin.records(path, part) if own_ids else records(path, config)
    many = not isinstance(found, list)
    first: dict[str, int] = {}
    ids: list[str] = []
    prompts: list[bytes] = []
    places: list[int] = []
    sharing: set[int] = set()
    held: list[R] = []

    def reading_of(record: Record, *, shares_id: bool = False) -> R:
        changed = bool(namespace) or shares_id
        return understand(replace(record, namespace=namespace, shares_id=shares_id) if changed else record, config)

    for place, record in enumerate(found):
        reading = reading_of(record)
        before = first.setdefault(reading.id, place)
        # Files of a folder may number different records alike, and so may two responses to one prompt be.
        if before != place and not own_ids and found[before].fields != record.fields:
            reading = reading_of(record, shares_id=True)
            before = first.setdefault(reading.id, place)
            sharing.add(place)
        if before != place:
            dropped[REPEATED] += 1
            continue
        ids.append(reading.id)
        prompts.append(hashlib.sha256(reading.prompt_text.encode(errors="surrogatepass")).digest())
        if many:
            places.append(place)
        else:
            held.append(reading)
    if many:
        again = Lazy(lambda place: reading_of(found[place], shares_id=place in sharing), places)
        return Part(again, ids, prompts)
    return Part(held, ids, prompts)


def _ids_to_put_aside(entries: list[Entry], train: list[Part[R]], count: int) -> set[str]:
    """Returns the ids to hold out, by a hash of them: at most `count`, and of prompts that have at most a tenth of the
    readings from files together, because no reading of such a prompt is trained on."""
    own = [part for entry, part in zip(entries, train, strict=True) if not builtin.has(entry.path)]
    ids = [identity for part in own for identity in part.ids]
    prompts = [prompt for part in own for prompt in part.prompts]
    most, sizes = len(ids) // 10, Counter(prompts)
    left, chosen = most, set[bytes]()
    found: set[str] = set()
    for place in order_by_hash(ids, salt="held out"):
        if len(found) == min(count, most):
            break
        prompt = prompts[place]
        if prompt not in chosen:
            if sizes[prompt] > left:
                continue
            left -= sizes[prompt]
            chosen.add(prompt)
        found.add(ids[place])
    return found


def order_by_hash(ids: Sequence[str], *, salt: str) -> list[int]:
    """Returns positions in a fixed pseudo-random order that depends only on the ids and the salt."""
    return sorted(range(len(ids)), key=lambda place: hashlib.sha256(f"{salt}:{ids[place]}".encode()).digest())
