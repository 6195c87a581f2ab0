"""Qwen3.5 without images, with experts."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._gated_delta_net import SplitGatedDeltaNet
from rlframe.models.families.base import Architecture
from rlframe.models.families.qwen3_next import Qwen3Next


class Qwen35Moe(Qwen3Next):
    """Qwen3-Next with other matrices into the gated delta net. Every layer has experts, whose weights sum to 1."""

    gated_delta_net = SplitGatedDeltaNet()
    layer_kinds = ("full_attention", "linear_attention")

    def architecture(self, hf: Mapping[str, Any]) -> Architecture:
        # No layer is dense, and config.json says nothing of the width of one.
        ignored = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
        return super().architecture({**hf, **ignored, "intermediate_size": hf.get("moe_intermediate_size")})


FAMILY = Qwen35Moe()
