"""Gemma 3 without images: the 270M and 1B models, and the language model of the others."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._window_rope import WindowRopeDecoder
from rlframe.models.families.base import faults_to_error

SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Gemma3Text(WindowRopeDecoder):
    """Four norms a layer, gelu, scaled embeddings, and a sliding window in five of six layers."""

    norms: Mapping[str, str] = {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
    default_theta = 1e6
    window_theta = 1e4
    default_kv_heads = 4
    pattern = 6
    default_tie = True

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        faults = [f"{key} is set, which is not supported" for key in SOFTCAPS if hf.get(key)]
        if hf.get("use_bidirectional_attention"):
            faults.append("use_bidirectional_attention is true: the model is an encoder")
        if (activation := hf.get("hidden_activation") or "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            faults.append(f"hidden_activation must be gelu_pytorch_tanh, got {activation!r:.60}")
        faults_to_error(hf, faults)
        return super().features(hf) | {
            "head_dim": hf.get("head_dim") or 256,
            "qk_norm": True,
            "softmax_scale": (hf.get("query_pre_attn_scalar") or 256) ** -0.5,
            "norm_after": True,
            "zero_centered_norms": True,
            "gelu": True,
            "embedding_scale": hf["hidden_size"] ** 0.5,
            "round_embedding_scale": True,
        }


FAMILY = Gemma3Text()
