"""The ladder: switches one cause after the other and measures the gap after each.

Switches are cumulative, in the order of the rungs. What a rung explains is (gap before - gap after) / first gap, of the
mean of |trainer - engine| over the sampled tokens. Rungs that start an engine are tried together first: a row of them
that explains little is not taken apart, so that one start answers for all.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rlframe.tools.explain_gap.gap import Gap, gap
from rlframe.tools.explain_gap.rung import Reading, Rung, Subject
from rlframe.tools.explain_gap.sides import Sample, Sides
from rlframe.utils.errors import RlframeError

ROUNDING_NATS = 1e-5
"""Greatest mean gap of two sides that compute the same in float32: there is nothing to explain."""
LITTLE = 0.05
"""Share of the first gap below which a row of rungs is not taken apart."""


class Counted(Sides, Protocol):
    """Sides that count what they start."""

    num_engine_starts: int
    longest_start_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a ladder's cost."""

    engine_starts: int = 6
    """Greatest number of engine starts."""
    seconds: float | None = None
    """Seconds after which no engine is started but that of the last rung. None means no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The result of a rung, or of several together."""

    names: tuple[str, ...]
    after: Gap | None = None
    """The gap with this rung and all before it switched. None if it was not measured."""
    explained: float = 0.0
    """Share of the first gap."""
    alone: float | None = None
    """Share of the first gap that this rung explains without those before it. None where that needs a start."""
    found: str = ""
    """A sentence of the rung."""
    skipped: str = ""
    """Reason why it was not climbed; empty if it was."""
    drawn_again: bool = False
    """Whether responses were drawn again, with the same seeds: the tokens are then partly others."""
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Climb:
    """The findings of a ladder so far."""

    first: Gap
    steps: list[Step] = field(default_factory=list)

    @property
    def rest(self) -> Gap:
        """The gap after the last rung that was climbed."""
        return next((step.after for step in reversed(self.steps) if step.after), self.first)

    @property
    def explained(self) -> float:
        """Share of the first gap that all rungs explain together."""
        return 1 - self.rest.mean_nats / self.first.mean_nats if self.first.mean_nats else 0.0


class Ladder:
    """One climb over the rungs."""

    def __init__(
        self,
        sides: Counted,
        subject: Subject,
        rungs: Sequence[Rung],
        *,
        impossible: Callable[[dict[str, Any]], str] = lambda settings: "",
        limits: Limits = Limits(),
        began: float | None = None,
        tell: Callable[[Climb], None] = lambda climb: None,
    ):
        """
        Args:
            impossible: returns why the sides cannot start with settings; empty if they can.
            began: when the seconds of `limits` began, of `time.monotonic`; None means now.
            tell: called after the first measurement and after each rung.
        """
        self._sides, self._subject, self._rungs = sides, subject, rungs
        self._impossible, self._limits, self._tell = impossible, limits, tell
        self._began = time.monotonic() if began is None else began
        self._settings: dict[str, Any] = {}
        self._start = self._reading = Reading(temperature=subject.run.rollout.temperature)
        self._sample: Sample | None = None
        self.engine_nats = self.trainer_nats = np.zeros(0, dtype=np.float32)
        """The two sides of the last measurement, by token of `sample`."""
        self._refusals = {rung.name: self._refusal(rung) for rung in rungs}
        self._starting = [rung for rung in rungs if not self._refusals[rung.name] and rung.settings(subject)]
        """The rungs that start an engine."""

    def climb(self) -> Climb:
        """Starts both sides, samples, and climbs all rungs if there is a gap."""
        self._sides.start({})
        self._sample = self._sides.sample()
        self._climb = Climb(first=self._measure())
        self._tell(self._climb)
        if self._climb.first.mean_nats < ROUNDING_NATS:
            return self._climb
        for row in self._rows():
            for step in self._row(row):
                self._climb.steps.append(step)
                self._tell(self._climb)
        return self._climb

    @property
    def sample(self) -> Sample:
        """The responses that are compared now."""
        assert self._sample is not None
        return self._sample

    def _rows(self) -> Iterator[list[Rung]]:
        """Yields neighbouring rungs that can be started together, and each other rung by itself."""
        row: list[Rung] = []
        for rung in self._rungs:
            starts = rung in self._starting
            if row and (self._refusals[rung.name] or (starts and rung.redraws == row[0].redraws)):
                row.append(rung)
                continue
            if row:
                yield row
            row = [rung] if starts else []
            if not starts:
                yield [rung]
        if row:
            yield row

    def _refusal(self, rung: Rung) -> str:
        """Returns why a rung does not apply; empty if it does."""
        if why := rung.refusal(self._subject):
            return why
        settings = dict(rung.settings(self._subject))
        return self._impossible(settings) if settings else ""

    def _row(self, row: Sequence[Rung]) -> Iterator[Step]:
        """Yields the steps of a row of `_rows`."""
        refused = [rung.name for rung in row if self._refusals[rung.name]]
        yield from (Step(names=(name,), skipped=self._refusals[name]) for name in refused)
        applying = [rung for rung in row if rung.name not in refused]
        if applying and applying[0] in self._starting:
            yield from self._started(applying)
        else:
            yield from map(self._switched, applying)

    def _switched(self, rung: Rung) -> Step:
        """Returns the step of a rung that starts nothing."""
        began = time.monotonic()
        # A start that has failed leaves nothing running.
        self._sides.start(self._settings)
        switched = rung.switch(self._subject, self._sides, self.sample, self._reading)
        same = switched.reading == self._reading and not switched.drawn_again
        self._reading = switched.reading
        if switched.drawn_again:
            self._sample = self._sides.sample()
        after = self._climb.rest if same else self._measure()
        step = self._step((rung.name,), after, began, found=switched.found, drawn_again=switched.drawn_again)
        if same:
            return replace(step, alone=0.0)
        return step if switched.drawn_again or self._settings else replace(step, alone=self._alone(rung))

    def _alone(self, rung: Rung) -> float:
        """Returns the share that a rung explains from the first reading, of the same responses."""
        if self._reading == self._start:
            return 0.0
        own = rung.switch(self._subject, self._sides, self.sample, self._start).reading
        return self._share(self._climb.first, gap(*own.of(self._sides, self.sample)))

    def _started(self, row: list[Rung]) -> Iterator[Step]:
        """Yields the steps of rungs that start an engine: all at once, and one after the other if they explain much."""
        is_last = row[-1] is self._starting[-1]
        if why := self._too_dear(is_last=is_last):
            yield from (Step(names=(rung.name,), skipped=why) for rung in row)
            return
        settings, sample = self._settings, self._sample
        together = self._restarted(row)
        if len(row) == 1 or abs(together.explained) < LITTLE or self._too_dear(is_last=False, starts=len(row)):
            yield together
            return
        self._settings, self._sample = settings, sample
        yield from (self._restarted([rung]) for rung in row)

    def _restarted(self, row: Sequence[Rung]) -> Step:
        """Starts the sides with the settings of the rungs, and measures."""
        began = time.monotonic()
        names = tuple(rung.name for rung in row)
        settings = self._settings | {key: value for rung in row for key, value in rung.settings(self._subject).items()}
        # A prefill scores the very same responses; what an engine says while it samples needs new ones.
        again, kept = not self._reading.prefill, self._sample
        try:
            self._sides.start(settings)
            if again:
                self._sample = self._sides.sample()
            after = self._measure()
        except RlframeError as error:
            self._sample = kept
            return Step(names=names, skipped=f"failed: {first_line(error)}", seconds=time.monotonic() - began)
        self._settings = settings
        return self._step(names, after, began, drawn_again=again)

    def _too_dear(self, *, is_last: bool, starts: int = 1) -> str:
        """Returns why `starts` more engines must not be started; empty if they may."""
        # The last rung is worth more than any before it, so its start is kept back.
        kept = 0 if is_last else 1
        left = self._limits.engine_starts - self._sides.num_engine_starts - kept
        if left < starts:
            return f"would start engine {self._sides.num_engine_starts + 1} of at most {self._limits.engine_starts}"
        if self._limits.seconds is not None and not is_last:
            needed = (starts + kept) * self._sides.longest_start_s
            if time.monotonic() - self._began + needed > self._limits.seconds:
                return f"no time is left of {self._limits.seconds:g} s"
        return ""

    def _measure(self) -> Gap:
        nats = self._reading.of(self._sides, self.sample)
        self.engine_nats, self.trainer_nats = nats
        return gap(*nats)

    def _share(self, before: Gap, after: Gap) -> float:
        first = self._climb.first.mean_nats
        return (before.mean_nats - after.mean_nats) / first if first else 0.0

    def _step(
        self, names: tuple[str, ...], after: Gap, began: float, *, found: str = "", drawn_again: bool = False
    ) -> Step:
        return Step(
            names=names,
            after=after,
            explained=self._share(self._climb.rest, after),
            found=found,
            drawn_again=drawn_again,
            seconds=time.monotonic() - began,
        )


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text."""
    return str(error).partition("\n")[0]
