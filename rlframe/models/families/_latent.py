"""The dimensions of latent attention as config.json states them."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families.base import MLADimensions, faults_to_error

NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NORM_EPS = 1e-6
"""Epsilon of the norms of the narrow vectors in DeepSeek's code and in transformers, whatever rms_norm_eps is."""


def features(hf: Mapping[str, Any], *, default_query_rank: int = 1536) -> dict[str, Any]:
    """Returns the fields of `Architecture` about latent attention.

    Args:
        default_query_rank: value of q_lora_rank if config.json has none. null means no rank.

    Raises:
        ConfigError: a key is missing, or Megatron-Core computes the positions differently.
    """
    faults = [f"{key} is missing" for key in NEEDED if hf.get(key) is None]
    if not hf.get("rope_interleave", True):
        faults.append("rope_interleave must be true: Megatron-Core 0.16.1 pairs neighbouring dimensions")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not rope.get("truncate", True):
        faults.append("rope truncate must be true: Megatron-Core 0.16.1 rounds the range of latent attention")
    faults_to_error(hf, faults)
    latent = MLADimensions(
        query_rank=hf.get("q_lora_rank", default_query_rank),
        kv_rank=hf["kv_lora_rank"],
        plain_head_dim=hf["qk_nope_head_dim"],
        rotary_head_dim=hf["qk_rope_head_dim"],
        value_head_dim=hf["v_head_dim"],
        norm_eps=NORM_EPS,
    )
    return {
        "latent": latent,
        "head_dim": latent.plain_head_dim + latent.rotary_head_dim,
        # Every head has its own key and value, regardless of num_key_value_heads.
        "num_kv_heads": hf["num_attention_heads"],
    }
