"""Qwen3.5 without images, dense."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _gated_delta_net, _mtp
from rlframe.models.families._decoder import Decoder
from rlframe.models.families._gated_delta_net import SplitGatedDeltaNet
from rlframe.models.families.base import faults_to_error


class Qwen35(Decoder):
    """Three of four layers have a gated delta net, and a quarter of each head has positions.

    Of a text all three positions of a token are equal, so that the sections of rope_parameters make no difference.
    """

    gated_delta_net = SplitGatedDeltaNet()
    layer_kinds = ("full_attention", "linear_attention")
    partial_rope = True
    default_partial = 0.25
    default_kv_heads = 4
    rope_kinds = ("default",)
    mtp = _mtp.APART

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        faults_to_error(hf, _gated_delta_net.faults(hf))
        return _gated_delta_net.features(hf) | {"head_dim": hf.get("head_dim") or 256}


FAMILY = Qwen35()
