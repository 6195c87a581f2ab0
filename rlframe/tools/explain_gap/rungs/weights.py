"""Weights that the engine does not hold."""

from rlframe.tools.explain_gap.rung import Reading, Rung, Subject, Switched
from rlframe.tools.explain_gap.sides import Sample, Sides


class Weights(Rung):
    """Compares the digests of all tensors, and sends the weights again if one differs."""

    place = 10
    name = "weights"
    question = "Does the engine hold the trainer's weights?"
    remedy = "weight_sync.audit_every_steps=1 finds the step; weight_sync.transport=reload uses the engine's own loader"
    cost = "an audit reads all weights once on both sides"

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """See Rung."""
        stale = sides.stale_weights()
        if not stale:
            return Switched(reading=reading, found="all tensors are equal, by digest")
        sides.send_weights()
        return Switched(reading=reading, found=stale, drawn_again=True)


RUNG = Weights()
