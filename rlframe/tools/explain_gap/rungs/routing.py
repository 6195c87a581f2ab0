"""Experts that trainer and engine choose differently."""

from dataclasses import replace

from rlframe.tools.explain_gap.rung import Reading, Rung, Subject, Switched
from rlframe.tools.explain_gap.sides import Sample, Sides


class Routing(Rung):
    """Makes the trainer's routers choose the engine's experts."""

    place = 40
    name = "routing"
    question = "Do the trainer's routers choose the engine's experts?"
    remedy = "train.moe.router_replay=true"
    cost = "layers * experts per token bytes a token between engines, driver and ranks"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        if not any(subject.architecture.moe_layers):
            return "the model has no experts"
        return "" if subject.replays else subject.why_not

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """See Rung."""
        return Switched(reading=replace(reading, replay=True))


RUNG = Routing()
