"""Compiled code and CUDA graphs of the engine."""

from collections.abc import Mapping
from typing import Any

from rlframe.rollout.served.config import ServedConfig
from rlframe.tools.explain_gap.rung import Rung, Subject


class CudaGraphs(Rung):
    """Runs the engine without compilation and without CUDA graphs."""

    place = 70
    name = "cuda_graphs"
    question = "Do compilation and CUDA graphs change the engine's numbers?"
    remedy = "rollout.enforce_eager=true"
    cost = "slower decoding, the more so the smaller the model"
    redraws = True

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        rollout = subject.run.rollout
        if not isinstance(rollout, ServedConfig):
            return f"rollout.name={subject.engine} neither compiles nor captures graphs"
        if subject.engine == "sglang" and not subject.cuda:
            return "SGLang on a CPU neither compiles nor captures graphs"
        return "rollout.enforce_eager=true already" if rollout.enforce_eager else ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        # Without compilation there is nothing left that rollout.compile could turn off.
        compiled = {"rollout.compile": False} if hasattr(subject.run.rollout, "compile") else {}
        return {"rollout.enforce_eager": True} | compiled


RUNG = CudaGraphs()
