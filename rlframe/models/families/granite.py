"""Granite 3 dense: 2B and 8B."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder

FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "softmax_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_divisor",
}
"""Fields of `Architecture` by their keys, each 1 where config.json has none, as in transformers' GraniteConfig."""


class Granite(Decoder):
    """The plain decoder with factors of embeddings, softmax and residual stream, and a divisor of logits."""

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {field: 1.0 if hf.get(key) is None else hf[key] for key, field in FACTORS.items()}


FAMILY = Granite()
