"""DeepSeek-V3, V3.1 and R1, and Moonlight."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _latent, _mtp, _sigmoid_router
from rlframe.models.families._attention import LatentAttention
from rlframe.models.families._decoder import Decoder


class DeepseekV3(Decoder):
    """Multi-head latent attention, groups of experts, and dense first layers."""

    attention = LatentAttention()
    rope_kinds = ("default", "yarn")
    mtp = _mtp.BEHIND_LAYERS

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return _sigmoid_router.features(hf, default_groups=(8, 4)) | _latent.features(hf)


FAMILY = DeepseekV3()
