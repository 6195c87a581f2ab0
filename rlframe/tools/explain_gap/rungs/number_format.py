"""The number format of parameters and activations."""

from collections.abc import Mapping
from typing import Any

from rlframe.megatron.config.options import Fp8Recipe
from rlframe.megatron.config.train import Dtype
from rlframe.rollout.base.config import EngineDtype, Logprobs
from rlframe.tools.explain_gap.rung import Rung, Subject
from rlframe.tools.explain_gap.rungs.eight_bits import RUNG as EIGHT_BITS


class NumberFormat(Rung):
    """Computes both sides in float32, from the model's weights in float32."""

    place = 130
    name = "float32"
    question = "Is it rounding, of parameters and activations?"
    remedy = "rollout.logprobs=exact (the embedded engine on a CPU), or train.dtype=float32 rollout.dtype=float32"
    cost = "twice the memory of weights and caches, and products at the speed of float32"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        run = subject.run
        both = run.rollout.number_format(run.train.dtype) is EngineDtype.FLOAT32
        if both and (run.train.dtype is Dtype.FLOAT32 or run.rollout.logprobs is Logprobs.EXACT):
            return "both sides compute in float32 already"
        if subject.engine == "sglang" and subject.cuda:
            return "SGLang does not compute in float32 on CUDA"
        return ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung. Precisions of other kinds are turned off, where they are float32's only."""
        found: dict[str, Any] = {"train.dtype": "float32", "rollout.dtype": "float32", "model.float32_logits": False}
        if subject.run.train.fp8.recipe is not Fp8Recipe.OFF:
            found["train.fp8"] = {}
        # A switch of this one alone; the ladder has switched it before.
        found |= EIGHT_BITS.settings(subject)
        if subject.run.train.optimizer.precision_aware:
            found |= {"train.optimizer.precision_aware": False, "train.optimizer.moment_dtype": "float32"}
        if subject.cuda:
            # No fused attention takes float32.
            found["train.kernels.attention"] = "unfused"
        return found


RUNG = NumberFormat()
