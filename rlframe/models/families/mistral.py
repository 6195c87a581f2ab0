"""Mistral 7B, Nemo, Small and Large, with a sliding window in all layers or in none."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import faults_to_error


class Mistral(Decoder):
    """The plain decoder, whose queries may see a window of tokens only."""

    windows = True
    default_kv_heads = 8

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        if hf.get("layer_types"):
            faults_to_error(hf, ["layer_types is set, which transformers does not read: model_type ministral has them"])
        # transformers' MistralConfig defaults to a window; published files without one say null.
        window = hf.get("sliding_window", 4096)
        if not window:
            return {}
        return {"sliding_window": window, "window_layers": (True,) * hf["num_hidden_layers"]}


FAMILY = Mistral()
