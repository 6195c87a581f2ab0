"""Rung: one possible cause of a gap, and the switch that takes it away."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rlframe.cluster.config import Device
from rlframe.models.families.base import Architecture
from rlframe.run.config import RunConfig
from rlframe.tools.explain_gap.gap import Nats, gap
from rlframe.tools.explain_gap.sides import Sample, Sides


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The thing to explain: a run with its model and device."""

    run: RunConfig
    architecture: Architecture
    device: Device
    replays: bool
    """Whether the engine returns routed experts and the trainer can replay them."""
    why_not: str = ""
    """Reason why it cannot, of a model with experts."""

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.run.rollout.name

    @property
    def cuda(self) -> bool:
        """Returns whether both sides compute on CUDA."""
        return self.device is Device.CUDA


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The way in which both sides are asked for the logprobs of a sample."""

    temperature: float
    """Divisor of the trainer's logits."""
    prefill: bool = False
    """Whether the engine's logprobs are those of its prefill, not those of sampling."""
    replay: bool = False
    """Whether the trainer's routers choose the experts that the engine chose in the same pass."""
    alone: bool = False
    """Whether every pass has one sequence. While the engine samples, that is the trainer's only."""
    kept: Nats | None = None
    """[N] nats of the tokens to which sampling was restricted, by which the trainer's logprobs are renormalised."""

    def of(self, sides: Sides, sample: Sample) -> tuple[Nats, Nats]:
        """Returns the nats of engine and trainer."""
        engine, routes = sample.logprobs, sample.routes
        if self.prefill:
            scores = sides.engine(sample, alone=self.alone)
            engine = sample.of_responses([each.logprobs for each in scores])
            found = [each.routes for each in scores if each.routes is not None]
            routes = found if len(found) == len(scores) else None
        trainer = sides.trainer(
            sample, temperature=self.temperature, routes=routes if self.replay else None, alone=self.alone
        )
        return engine, trainer if self.kept is None else trainer - self.kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """The result of a switch: how the sides are read from here on, and what was found."""

    reading: Reading
    found: str = ""
    """A sentence for people."""
    drawn_again: bool = False
    """Whether the engine changed, so that the responses must be drawn again."""


class Rung(ABC):
    """Base of all rungs. A file of `rungs` ends `RUNG = TheRung()`.

    A rung switches either the settings of both sides (`settings`), which starts what they change, or the way in which
    they are read (`switch`).
    """

    place: ClassVar[int]
    """Its place in the order of the ladder. Switches of lower rungs stay on."""
    name: ClassVar[str]
    question: ClassVar[str]
    """The question that it answers, for people."""
    remedy: ClassVar[str]
    """Settings that remove the cause in a run, with dotted keys, or what else to do."""
    cost: ClassVar[str]
    """The cost of the remedy."""
    redraws: ClassVar[bool] = False
    """Whether it is about how responses are sampled, so that its settings are judged on responses drawn again."""

    def refusal(self, subject: Subject) -> str:
        """Returns why the rung does not apply to the subject; empty if it does."""
        return ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """Returns the settings that both sides have from here on, by dotted key. Empty if none changes."""
        return {}

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """Switches what needs no start. Returns how the sides are read from here on."""
        return Switched(reading=reading)


def closer(sides: Sides, sample: Sample, before: Reading, after: Reading, *, by: float = 0.01) -> bool:
    """Returns whether `after` brings the sides closer by more than a fraction `by` of the gap: less is chance."""
    first, second = (gap(*each.of(sides, sample)).mean_nats for each in (before, after))
    return second < (1 - by) * first


def with_temperature(reading: Reading, temperature: float) -> Reading:
    """Returns `reading` at another temperature of the trainer."""
    return replace(reading, temperature=float(np.round(temperature, 4)))
