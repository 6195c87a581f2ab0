"""EXAONE 4.0 1.2B and 32B."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import olmo2
from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import faults_to_error


class Exaone4(Decoder):
    """Norms after attention and MLP instead of before; the large model has windows, and no positions without them."""

    norms = olmo2.NORMS
    windows = True
    default_kv_heads = 32

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        features = {"norm_before": False, "norm_after": True, "qk_norm": True}
        # transformers' Exaone4Config defaults to a window.
        window = hf.get("sliding_window", 4096)
        if not window:
            return features
        kinds, pattern = hf.get("layer_types"), hf.get("sliding_window_pattern", 4)
        if not kinds and not (isinstance(pattern, int) and pattern):
            faults_to_error(hf, [f"sliding_window_pattern {pattern!r:.60} needs layer_types"])
        windowed = (
            tuple(kind == "sliding_attention" for kind in kinds)
            if kinds
            else tuple(bool((layer + 1) % pattern) for layer in range(hf["num_hidden_layers"]))
        )
        return features | {
            "sliding_window": window,
            "window_layers": windowed,
            "no_rope_layers": tuple(not each for each in windowed),
        }


FAMILY = Exaone4()
