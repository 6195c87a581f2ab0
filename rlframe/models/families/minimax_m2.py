"""MiniMax-M2 and M2.1. The modules for multi-token prediction are not loaded, as in transformers."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families._mlp import Experts, Projections
from rlframe.models.families.base import Architecture, faults_to_error

NEEDED = ("num_local_experts", "num_experts_per_tok")
PUBLISHED = {
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
"""Keys that only the model's own code and engines read."""


class MiniMaxM2(Decoder):
    """Experts with a sigmoid router in every layer, norms over all query heads and over all key heads together, and
    part of each head rotary."""

    experts = Experts("block_sparse_moe.", Projections("w1", "w3", "w2"), bias="e_score_correction_bias")
    default_theta = 5e6
    default_kv_heads = 8
    rope_kinds = ("default",)
    partial_rope = True

    def architecture(self, hf: Mapping[str, Any]) -> Architecture:
        if hf.get("rotary_dim"):
            # The published name of the same thing.
            hf = {"partial_rotary_factor": hf["rotary_dim"] / (hf.get("head_dim") or 128), **hf}
        return super().architecture(hf)

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        faults = [f"{key} is missing" for key in NEEDED if hf.get(key) is None]
        faults += [
            f"{key} must be {known}, which is all that transformers computes, got {hf[key]!r:.60}"
            for key, known in PUBLISHED.items()
            if hf.get(key, known) != known
        ]
        if 0 in (hf.get("attn_type_list") or ()):
            faults.append("attn_type_list must be 1 for every layer: linear attention is not supported")
        if hf.get("num_experts_per_tok") == 1:
            faults.append("num_experts_per_tok must be at least 2: Megatron-Core 0.16.1 does not normalise one score")
        faults_to_error(hf, faults)
        return {
            "head_dim": hf.get("head_dim") or 128,
            "qk_norm": True,
            "whole_qk_norm": True,
            "num_experts": hf["num_local_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
            "expert_ffn_hidden_size": hf["intermediate_size"],
            "sigmoid_router": True,
            "moe_layers": (True,) * hf["num_hidden_layers"],
        }


FAMILY = MiniMaxM2()
