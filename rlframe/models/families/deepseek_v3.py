"""DeepSeek-V3, V3.1 and R1, and Moonlight. The layers for multi-token prediction are not loaded, as in transformers."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _sigmoid_router
from rlframe.models.families._attention import LatentAttention
from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import MLADimensions, faults_to_error

NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_NORM_EPS = 1e-6
"""Epsilon of the two norms of latent vectors in DeepSeek's code, whatever rms_norm_eps is. Megatron has one epsilon for
all norms."""


class DeepseekV3(Decoder):
    """Multi-head latent attention, groups of experts, and dense first layers."""

    attention = LatentAttention()
    rope_kinds = ("default", "yarn")

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        faults = [f"{key} is missing" for key in NEEDED if hf.get(key) is None]
        if hf["rms_norm_eps"] != LATENT_NORM_EPS:
            faults.append(
                f"rms_norm_eps must be {LATENT_NORM_EPS}, the epsilon of the latent norms, got {hf['rms_norm_eps']}"
            )
        if not hf.get("rope_interleave", True):
            faults.append("rope_interleave must be true: Megatron-Core 0.16.1 pairs neighbouring dimensions")
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if not rope.get("truncate", True):
            faults.append("rope truncate must be true: Megatron-Core 0.16.1 rounds the range of latent attention")
        faults_to_error(hf, faults)
        latent = MLADimensions(
            query_rank=hf.get("q_lora_rank"),
            kv_rank=hf["kv_lora_rank"],
            plain_head_dim=hf["qk_nope_head_dim"],
            rotary_head_dim=hf["qk_rope_head_dim"],
            value_head_dim=hf["v_head_dim"],
        )
        return _sigmoid_router.features(hf) | {
            "latent": latent,
            "head_dim": latent.plain_head_dim + latent.rotary_head_dim,
            # Every head has its own key and value, regardless of num_key_value_heads.
            "num_kv_heads": hf["num_attention_heads"],
        }


FAMILY = DeepseekV3()
