"""Sums over the engine's tensor-parallel devices."""

from collections.abc import Mapping
from typing import Any

from rlframe.tools.explain_gap.rung import Rung, Subject


class TensorParallel(Rung):
    """Runs the engine on one device. The trainer keeps its layout."""

    place = 80
    name = "tensor_parallel"
    question = "Does the order of sums over the engine's devices matter?"
    remedy = "rollout.tp=1, with rollout.num_engines raised instead"
    cost = "each device holds all weights"
    redraws = True

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        return "the engine has one device (rollout.tp=1)" if getattr(subject.run.rollout, "tp", 1) == 1 else ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        return {"rollout.tp": 1, "rollout.expert_parallel": False}


RUNG = TensorParallel()
