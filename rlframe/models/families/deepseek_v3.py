"""DeepSeek-V3, V3.1 and R1, and Moonlight. The layers for multi-token prediction are not loaded, as in transformers."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _latent, _sigmoid_router
from rlframe.models.families._attention import LatentAttention
from rlframe.models.families._decoder import Decoder


class DeepseekV3(Decoder):
    """Multi-head latent attention, groups of experts, and dense first layers."""

    attention = LatentAttention()
    rope_kinds = ("default", "yarn")

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return _sigmoid_router.features(hf) | _latent.features(hf)


FAMILY = DeepseekV3()
