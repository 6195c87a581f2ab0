"""Sequences that share a pass."""

from dataclasses import replace

from rlframe.tools.explain_gap.rung import Reading, Rung, Subject, Switched
from rlframe.tools.explain_gap.sides import Sample, Sides


class BatchComposition(Rung):
    """Gives both sides one sequence at a time: nothing is packed, padded or batched."""

    place = 100
    name = "batch"
    question = "Does it matter which sequences share a pass?"
    remedy = "none on the trainer's side; VLLM_BATCH_INVARIANT=1 on vLLM's"
    cost = "one sequence at a time is slower by the size of the batch; batch-invariant kernels by about a third"

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """See Rung."""
        return Switched(reading=replace(reading, alone=True))


RUNG = BatchComposition()
