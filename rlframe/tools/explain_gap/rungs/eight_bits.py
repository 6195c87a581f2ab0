"""Numbers of 8 bits in the engine: its weights, with the inputs of their products, and its keys and values."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import CacheFormat
from rlframe.tools.explain_gap.rung import Rung, Subject


class EightBits(Rung):
    """Gives the engine weights, keys and values of 16 bits."""

    place = 105
    name = "eight_bits"
    question = "Is it the engine's rounding to 8 bits?"
    remedy = "rollout.quantization=none and rollout.kv_cache_dtype=auto; algorithm corrections weigh what they cost"
    cost = "twice the memory of weights and caches, and slower products"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        rollout = subject.run.rollout
        plain = rollout.engine_format is EngineFormat.NONE and rollout.cache_format is CacheFormat.AUTO
        return "the engine has no numbers of 8 bits" if plain else ""

    def settings(self, subject: Subject) -> Mapping[str, Any]:
        """See Rung."""
        rollout = subject.run.rollout
        found: dict[str, Any] = {}
        if rollout.engine_format is not EngineFormat.NONE:
            found["rollout.quantization"] = EngineFormat.NONE.value
        if rollout.cache_format is not CacheFormat.AUTO:
            found["rollout.kv_cache_dtype"] = CacheFormat.AUTO.value
        return found


RUNG = EightBits()
