"""The number format of the logits."""

from collections.abc import Mapping
from typing import Any

from rlframe.megatron.config.train import Dtype
from rlframe.rollout.base.config import EngineDtype
from rlframe.tools.explain_gap.rung import Rung, Subject


class Head(Rung):
    """Keeps the logits of both sides in float32, from states and weights in bfloat16."""

    place = 120
    name = "head"
    question = "Is it the rounding of logits?"
    remedy = "model.float32_logits=true"
    cost = "two to three times the memory of logits in training; on a CPU also an output layer at the speed of float32"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        run = subject.run
        if run.model.float32_logits:
            return "both sides keep logits in float32 already"
        if run.train.dtype is Dtype.FLOAT32 or run.rollout.number_format(run.train.dtype) is EngineDtype.FLOAT32:
            return "a side computes in float32 already"
        return ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        return {"model.float32_logits": True}


RUNG = Head()
