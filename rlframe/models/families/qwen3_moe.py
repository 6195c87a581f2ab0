"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import faults_to_error


class Qwen3Moe(Decoder):
    """Query and key heads are normalised. Every layer has experts unless config.json says otherwise."""

    default_kv_heads = 4

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # transformers 5 writes num_local_experts, older versions num_experts.
        experts = hf.get("num_local_experts") or hf.get("num_experts") or 0
        needed = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        faults = [f"{key} is missing" for key in needed if hf.get(key) is None]
        faults_to_error(hf, faults if experts else [*faults, "num_experts is missing"])
        dense = set(hf.get("mlp_only_layers") or ())
        step = hf.get("decoder_sparse_step") or 1
        return {
            "qk_norm": True,
            "num_experts": experts,
            "experts_per_token": hf["num_experts_per_tok"],
            "expert_ffn_hidden_size": hf["moe_intermediate_size"],
            "norm_topk_prob": hf["norm_topk_prob"],
            "moe_layers": tuple(
                layer not in dense and (layer + 1) % step == 0 for layer in range(hf["num_hidden_layers"])
            ),
        }


FAMILY = Qwen3Moe()
