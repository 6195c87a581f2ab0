"""Sampling one token at a time, against one pass over the whole sequence."""

from dataclasses import replace

from rlframe.tools.explain_gap.rung import Reading, Rung, Subject, Switched
from rlframe.tools.explain_gap.sides import Sample, Sides


class Prefill(Rung):
    """Reads the engine's own prefill of the sampled sequences instead of what it said while it sampled."""

    place = 90
    name = "prefill"
    question = "Does the engine's prefill say what it said while it sampled?"
    remedy = "none: an engine decodes with other kernels than it prefills with; algorithm corrections weigh the rest"
    cost = "one prefill of every sequence, if logprobs were taken from it"

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """See Rung. Engines score given tokens at temperature 1 and filter nothing."""
        after = replace(reading, prefill=True, temperature=1.0, kept=None)
        found = "" if reading.temperature == 1 else "from here on both sides are at temperature 1"
        return Switched(reading=after, found=found)


RUNG = Prefill()
