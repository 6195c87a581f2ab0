"""Prompts that the engine prefills in several passes."""

from collections.abc import Mapping
from typing import Any

from rlframe.tools.explain_gap.rung import Rung, Subject

WHOLE = {
    "vllm": {"enable_chunked_prefill": False},
    "sglang": {"chunked_prefill_size": -1},
}
"""Arguments with which each engine prefills every prompt in one pass."""


class ChunkedPrefill(Rung):
    """Makes the engine prefill every prompt in one pass."""

    place = 60
    name = "chunked_prefill"
    question = "Does it matter that prompts are prefilled in pieces, beside running requests?"
    remedy = "rollout.engine_options: enable_chunked_prefill=false (vLLM), chunked_prefill_size=-1 (SGLang)"
    cost = "running requests wait while a prompt is prefilled"
    redraws = True

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        if subject.engine not in WHOLE:
            return f"rollout.name={subject.engine} prefills every prompt in one pass"
        if subject.engine == "vllm" and not subject.cuda:
            return "vLLM on a CPU prefills every prompt in one pass"
        given = subject.run.rollout.engine_options  # pyright: ignore[reportAttributeAccessIssue]
        return "rollout.engine_options turns it off already" if given.items() >= WHOLE[subject.engine].items() else ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        options = dict(WHOLE[subject.engine])
        if subject.engine == "vllm":
            # vLLM then takes no sequence that does not fit one pass.
            limit = subject.run.rollout.sequence_tokens or subject.architecture.max_positions
            options["max_num_batched_tokens"] = max(limit, 8192)
        return {f"rollout.engine_options.{name}": value for name, value in options.items()}


RUNG = ChunkedPrefill()
