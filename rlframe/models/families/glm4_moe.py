"""GLM-4.5, GLM-4.5-Air and GLM-4.6."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _mtp, _sigmoid_router
from rlframe.models.families._decoder import Decoder


class Glm4Moe(Decoder):
    """Half of each head has positions, query, key and value have biases, and the first layers are dense."""

    rope_kinds = ("default",)
    partial_rope = True
    default_partial = 0.5
    attention_bias = True
    default_kv_heads = 8
    mtp = _mtp.BEHIND_LAYERS

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return _sigmoid_router.features(hf, default_scale=1.0, default_dense=1) | {
            "qkv_bias": bool(hf.get("attention_bias")),
            "qk_norm": bool(hf.get("use_qk_norm")),
        }


FAMILY = Glm4Moe()
