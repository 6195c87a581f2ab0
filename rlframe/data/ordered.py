"""Orders of a curriculum: the walks over prompts that are not random. Each prompt is still dealt once per epoch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from numpy.typing import ArrayLike

from rlframe.data.curriculum import CurriculumConfig
from rlframe.data.cursor import Cursor, Walk
from rlframe.utils.errors import DataError

Item = TypeVar("Item")
OTHER_RUN = "Resume with the data and settings the run began with, or start a new run"


class RatedCursor(Cursor[Item]):
    """A cursor whose epochs after the first have an order by pass rate, and pass prompts over.

    An epoch uses the rates that are known when it begins, so that each item comes once in it, whatever is measured
    meanwhile. No item is passed over in two epochs in a row.

    Example: the rates of a, b, c, d are 1, 0.5, 0, 0.25, and those between 0.1 and 0.9 are wanted. With the target 0.5
    the next epoch deals b, d, and passes a and c over. If b is then always right, and d is right every other time, the
    epoch after deals d, a, c, and passes b over.
    """

    def __init__(
        self,
        items: Sequence[Item],
        *,
        ids: Sequence[str],
        tokens: Sequence[ArrayLike],
        seed: int,
        shuffle: bool,
        curriculum: CurriculumConfig,
    ):
        self._curriculum = curriculum
        self._places = {identity: place for place, identity in enumerate(ids)}
        self._rates: list[float | None] = [None] * len(ids)
        self._ranked = list(self._rates)
        """The rates when the epoch began."""
        self._passed: set[int] = set()
        """The items that the epoch passes over."""
        super().__init__(items, ids=ids, tokens=tokens, seed=seed, shuffle=shuffle)

    def measure(self, identity: str, rate: float) -> None:
        """Records the pass rate of an item, if it is one of these."""
        if identity in self._places:
            self._rates[self._places[identity]] = rate

    def passes_over(self, identity: str) -> bool:
        """Returns whether the present epoch passes an item over."""
        return self._places.get(identity) in self._passed

    def _begin_epoch(self, epoch: int) -> None:
        self._ranked = list(self._rates)
        low, high = self._curriculum.lowest, self._curriculum.highest
        unwanted = {place for place, rate in enumerate(self._ranked) if rate is not None and not low <= rate <= high}
        self._passed = unwanted - self._passed
        super()._begin_epoch(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order, target = super()._order_of(epoch), self._curriculum.target
        if target is None:
            return order
        return sorted(order, key=lambda place: -1 if (rate := self._ranked[place]) is None else abs(rate - target))

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, and the rates, as plain JSON values."""
        return super().state() | {
            "rates": list(self._rates),
            "ranked": list(self._ranked),
            "passed": sorted(self._passed),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Cursor."""
        if not {"rates", "ranked", "passed"} <= state.keys():
            raise DataError(f"the checkpoint has no pass rates (data.curriculum). {OTHER_RUN}")
        rates, ranked, passed = self._rates, self._ranked, self._passed
        self._rates, self._ranked, self._passed = list(state["rates"]), list(state["ranked"]), set(state["passed"])
        try:
            super().restore(state)
        except DataError:
            self._rates, self._ranked, self._passed = rates, ranked, passed
            raise


class Stages(Generic[Item]):
    """The streams of several stages, one after the other. Each stage has epochs of its own."""

    def __init__(self, streams: Mapping[str, Walk[Item]], *, firsts: Mapping[str, int]):
        """
        Args:
            firsts: first step of each stage.
        """
        self._streams = dict(streams)
        self._firsts = dict(sorted(firsts.items(), key=lambda pair: pair[1]))
        self._present = next(iter(self._firsts))

    def reach(self, step: int) -> None:
        """Moves to the stage of a step, for which items are dealt from here on."""
        self._present = list(self._firsts)[self.index_at(step)]

    def index_at(self, step: int) -> int:
        """Returns the index of the stage of a step, from 0."""
        return sum(first <= max(step, 1) for first in self._firsts.values()) - 1

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def first(self, count: int) -> list[Item]:
        """Returns at most `count` items from the beginnings of the stages, the same ones every time. Deals nothing."""
        return [item for name in self._firsts for item in self._streams[name].first(count)][:count]

    @property
    def epoch(self) -> int:
        """Epoch of the present stage, from 0."""
        return self._streams[self._present].epoch

    @property
    def last_epoch(self) -> int:
        """Epoch of the item dealt last within its stage, from 0."""
        return self._streams[self._present].last_epoch

    def next(self, count: int) -> list[Item]:
        """Deals the next `count` items of the present stage."""
        return self._streams[self._present].next(count)

    def state(self) -> dict[str, Any]:
        """Returns where the walk stands, as plain JSON values."""
        return {
            "stages": self._firsts,
            "present": self._present,
            "streams": {name: stream.state() for name, stream in self._streams.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`.

        Raises:
            DataError: the stages or their data are not those of `state`.
        """
        if state.get("stages") != self._firsts:
            raise DataError(
                "the data is not that of the checkpoint: data.curriculum.stages was "
                f"{state.get('stages', 'none')} and is now {self._firsts}. {OTHER_RUN}"
            )
        for name, stream in self._streams.items():
            stream.restore(state["streams"][name])
        self._present = state["present"]


def numbers_of(fields: Sequence[Mapping[str, Any]], curriculum: CurriculumConfig, *, what: str) -> list[float]:
    """Returns the number of each record by which its prompt is placed, the smallest first.

    Args:
        fields: the records.
        what: name of the dataset, for messages.

    Raises:
        DataError: a record has no finite number in the field.
    """
    return [-value if curriculum.descending else value for value in _numbers(fields, str(curriculum.field), what)]


def _numbers(fields: Sequence[Mapping[str, Any]], name: str, what: str) -> Iterator[float]:
    for place, record in enumerate(fields):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(
                f"{what}: expected a number in the field {name!r} of every record (data.curriculum.field), found "
                f"{value!r:.60} in prompt {place}"
            )
        yield float(value)


def places_by_stage(
    fields: Sequence[Mapping[str, Any]], curriculum: CurriculumConfig, *, what: str
) -> dict[str, list[int]]:
    """Returns the places of the records of each stage.

    Raises:
        DataError: a record names no stage, or a stage has no record.
    """
    assert curriculum.stages is not None and curriculum.field is not None
    found: dict[str, list[int]] = {name: [] for name in curriculum.stages}
    for place, record in enumerate(fields):
        name = str(record.get(curriculum.field))
        if name not in found:
            raise DataError(
                f"{what}: expected the name of a stage in the field {curriculum.field!r} of every record "
                f"(data.curriculum.stages: {', '.join(found)}), found {name!r:.60} in prompt {place}"
            )
        found[name].append(place)
    if empty := [name for name, places in found.items() if not places]:
        raise DataError(
            f"{what}: expected records of every stage of data.curriculum.stages, found none of {empty[0]!r}"
        )
    return found
