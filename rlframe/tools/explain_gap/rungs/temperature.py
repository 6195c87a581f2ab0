"""A temperature that the two sides do not share."""

import math
from dataclasses import replace

from rlframe.tools.explain_gap.gap import gap
from rlframe.tools.explain_gap.rung import Reading, Rung, Subject, Switched, closer, with_temperature
from rlframe.tools.explain_gap.sides import Sample, Sides

WIDEST = 3.0
"""Factor on both sides of the run's temperature within which another one is looked for."""
LOOKS = 12
"""Passes of the search, each of which narrows it to 62 %: to 1 % of the temperature."""
LEAST = 0.02
"""Least relative distance from the run's temperature: less is rounding, to which any number can be fitted."""
SEQUENCES = 16
"""Greatest number of sequences of the search."""


class Temperature(Rung):
    """Looks for the temperature of the trainer that fits the engine's logprobs best."""

    place = 20
    name = "temperature"
    question = "Are the engine's logprobs those of the trainer's temperature?"
    remedy = "rollout.temperature=1, where all conventions agree; report an engine that answers with another one"
    cost = "none in speed; other samples"

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """See Rung."""
        own = replace(reading, prefill=True)
        if reading.temperature == 1 and says_the_same(sides, sample, reading, own):
            return Switched(reading=reading, found="the engine's prefill, at temperature 1, says the same")
        fit = with_temperature(reading, best_fit(sides, sample.first(SEQUENCES), reading))
        too_near = abs(math.log(fit.temperature / reading.temperature)) < LEAST
        if too_near or not closer(sides, sample, reading, fit):
            return Switched(reading=reading, found=f"the engine's logprobs fit temperature {reading.temperature:g}")
        found = f"the engine's logprobs fit temperature {fit.temperature:.2f}, the trainer's is {reading.temperature:g}"
        return Switched(reading=fit, found=found)


def says_the_same(sides: Sides, sample: Sample, sampled: Reading, prefill: Reading) -> bool:
    """Returns whether the engine's sampling is nearer to its own prefill than to the trainer by half."""
    engine, trainer = sampled.of(sides, sample)
    own, _ = prefill.of(sides, sample)
    return gap(engine, own).mean_nats < gap(engine, trainer).mean_nats / 2


def best_fit(sides: Sides, sample: Sample, reading: Reading) -> float:
    """Returns the temperature of the least mean gap, by golden-section search over its logarithm."""
    ratio = (math.sqrt(5) - 1) / 2

    def height(place: float) -> float:
        return gap(*replace(reading, temperature=math.exp(place)).of(sides, sample)).mean_nats

    middle, width = math.log(reading.temperature), math.log(WIDEST)
    low, high = middle - width, middle + width
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = height(left), height(right)
    for _ in range(LOOKS - 2):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = height(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = height(right)
    return math.exp((low + high) / 2)


RUNG = Temperature()
