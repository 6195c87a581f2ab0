"""Mixtral 8x7B and 8x22B."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families._mlp import Experts, Projections
from rlframe.models.families.base import faults_to_error


class Mixtral(Decoder):
    """Experts in every layer, under the names of Mistral's own code."""

    experts = Experts("block_sparse_moe.", Projections("w1", "w3", "w2"))
    default_theta = 1e6
    default_kv_heads = 8
    rope_kinds = ("default",)

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        needed = ("num_local_experts", "num_experts_per_tok")
        faults = [f"{key} is missing" for key in needed if hf.get(key) is None]
        if hf.get("sliding_window"):
            faults.append(f"sliding_window must be null, got {hf['sliding_window']}")
        faults_to_error(hf, faults)
        return {
            "num_experts": hf["num_local_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
            "expert_ffn_hidden_size": hf["intermediate_size"],
            "moe_layers": (True,) * hf["num_hidden_layers"],
        }


FAMILY = Mixtral()
