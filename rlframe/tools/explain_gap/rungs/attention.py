"""The kernels of attention."""

from collections.abc import Mapping
from typing import Any

from rlframe.tools.explain_gap.rung import Rung, Subject

PLAIN = {
    "vllm": {"attention_config": {"backend": "TRITON_ATTN"}},
    "sglang": {"attention_backend": "triton"},
}
"""Arguments with which each engine takes Triton's attention, whose sums are in float32."""


class AttentionBackend(Rung):
    """Takes the plainest attention that each side has: unfused in Transformer Engine, Triton's in the engine."""

    place = 110
    name = "attention"
    question = "Do the kernels of attention differ?"
    remedy = (
        "train.kernels.attention=unfused with rollout.engine_options: attention_config.backend=TRITON_ATTN (vLLM), "
        "attention_backend=triton (SGLang)"
    )
    cost = "unfused attention keeps length^2 scores a head; much slower beyond 4,096 tokens"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        if not subject.cuda:
            return "both sides have one attention on a CPU"
        return "" if subject.engine in PLAIN else f"rollout.name={subject.engine} has one attention"

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        options = {f"rollout.engine_options.{name}": value for name, value in PLAIN[subject.engine].items()}
        return {"train.kernels.attention": "unfused"} | options


RUNG = AttentionBackend()
