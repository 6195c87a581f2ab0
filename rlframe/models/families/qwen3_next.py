"""Qwen3-Next."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _gated_delta_net, _mtp
from rlframe.models.families._gated_delta_net import GatedDeltaNet
from rlframe.models.families._mlp import Experts
from rlframe.models.families.base import faults_to_error
from rlframe.models.families.qwen3_moe import Qwen3Moe


class Qwen3Next(Qwen3Moe):
    """Three of four layers have a gated delta net; a quarter of each head has positions; all tokens share an expert."""

    gated_delta_net = GatedDeltaNet()
    layer_kinds = ("full_attention", "linear_attention")
    experts = Experts(shared="shared_expert")
    partial_rope = True
    default_partial = 0.25
    default_kv_heads = 2
    rope_kinds = ("default",)
    mtp = _mtp.APART

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        faults = _gated_delta_net.faults(hf)
        if hf.get("shared_expert_intermediate_size") is None:
            faults.append("shared_expert_intermediate_size is missing")
        faults_to_error(hf, faults)
        return (
            super().features(hf)
            | _gated_delta_net.features(hf)
            | {
                "head_dim": hf.get("head_dim") or 256,
                "shared_ffn_hidden_size": hf["shared_expert_intermediate_size"],
                "shared_expert_gate": True,
            }
        )


FAMILY = Qwen3Next()
