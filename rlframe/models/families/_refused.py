"""A model type that is known but cannot be trained; its error gives the reasons."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from rlframe.models.families._layer_specs import Shapes
from rlframe.models.families.base import Architecture, Family, Shard, faults_to_error

NO_IMAGES = "it has a vision tower, and rlframe trains text models"
VISION = f"{NO_IMAGES}: save its language model alone, as rlframe/models/README.md says under Models with images"


class Refused(Family):
    """Refuses every config.json. It exists so that the error gives the reasons, not only that the type is unknown."""

    def __init__(self, *reasons: str):
        self.reasons = list(reasons)

    def architecture(self, hf: Mapping[str, Any]) -> NoReturn:
        faults_to_error(hf, self.reasons)
        raise AssertionError("a refusal needs a reason")

    def tensors(self, architecture: Architecture) -> Shapes:
        raise AssertionError("a refused model type has no architecture")

    def parameters(self, architecture: Architecture, shard: Shard) -> Shapes:
        raise AssertionError("a refused model type has no architecture")

    def load(
        self,
        parameters: Mapping[str, Tensor],
        checkpoint: Mapping[str, Tensor],
        architecture: Architecture,
        shard: Shard,
    ) -> None:
        raise AssertionError("a refused model type has no architecture")
