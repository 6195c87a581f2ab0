"""OLMo 2."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder

NORMS = {"self_attn_bda.norm": "post_attention_layernorm", "mlp_bda.norm": "post_feedforward_layernorm"}
FEATURES = {"norm_before": False, "norm_after": True, "qk_norm": True, "whole_qk_norm": True}


class Olmo2(Decoder):
    """Norms after attention and MLP instead of before, and one norm over all queries, one over all keys."""

    norms = NORMS

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return FEATURES


FAMILY = Olmo2()
