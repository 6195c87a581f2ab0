"""SmolLM3 3B."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder


class SmolLM3(Decoder):
    """Every fourth layer has no positions (arXiv 2501.18795)."""

    default_theta = 2e6
    default_kv_heads = 4
    default_tie = True

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        layers, interval = hf["num_hidden_layers"], hf.get("no_rope_layer_interval") or 4
        # A 1 stands for a layer with positions.
        with_rope = hf.get("no_rope_layers")
        if with_rope is None:
            with_rope = [(layer + 1) % interval for layer in range(layers)]
        return {"no_rope_layers": tuple(not rope for rope in with_rope)}


FAMILY = SmolLM3()
