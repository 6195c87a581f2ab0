"""The kernels of attention."""

from collections.abc import Mapping
from typing import Any

from rlframe.tools.explain_gap.rung import Rung, Subject

PLAIN = {"vllm": "TRITON_ATTN", "sglang": "triton"}
"""Back end of each engine that computes attention as its formula says, with sums in float32."""


class AttentionBackend(Rung):
    """Takes the plainest attention that each side has: unfused in Transformer Engine, Triton's in the engine."""

    place = 110
    name = "attention"
    question = "Do the kernels of attention differ?"
    remedy = "train.kernels.attention=unfused and rollout.engine_options.attention_backend=TRITON_ATTN (SGLang: triton)"
    cost = "unfused attention keeps length^2 scores a head; much slower beyond 4,096 tokens"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        if not subject.cuda:
            return "both sides have one attention on a CPU"
        return "" if subject.engine in PLAIN else f"rollout.name={subject.engine} has one attention"

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        return {
            "rollout.engine_options.attention_backend": PLAIN[subject.engine],
            "train.kernels.attention": "unfused",
        }


RUNG = AttentionBackend()
