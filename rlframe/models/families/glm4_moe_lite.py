"""GLM-4.7-Flash."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _latent, _mtp, _sigmoid_router
from rlframe.models.families._attention import LatentAttention
from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import faults_to_error


class Glm4MoeLite(Decoder):
    """The latent attention of DeepSeek-V3 with the experts of GLM-4.5."""

    attention = LatentAttention()
    rope_kinds = ("default",)
    mtp = _mtp.BEHIND_LAYERS

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        dense = hf.get("first_k_dense_replace", 1)
        if dense != 1 and not hf.get("mlp_layer_types"):
            faults_to_error(hf, [f"first_k_dense_replace must be 1, as transformers computes, got {dense}"])
        return _sigmoid_router.features(hf, default_scale=1.8, default_dense=1) | _latent.features(
            hf, default_query_rank=768
        )


FAMILY = Glm4MoeLite()
