"""A model type that is known and cannot be trained, which says why."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from rlframe.models.families._layer_specs import Shapes
from rlframe.models.families.base import Architecture, Family, Shard, faults_to_error


class Refused(Family):
    """Reads no config.json. Better than no file of that name: the reasons are in the error."""

    def __init__(self, *reasons: str):
        self.reasons = list(reasons)

    def architecture(self, hf: Mapping[str, Any]) -> NoReturn:
        faults_to_error(hf, self.reasons)
        raise AssertionError("a refusal without a reason")

    def tensors(self, architecture: Architecture) -> Shapes:
        raise AssertionError("there is no such architecture")

    def parameters(self, architecture: Architecture, shard: Shard) -> Shapes:
        raise AssertionError("there is no such architecture")

    def load(
        self,
        parameters: Mapping[str, Tensor],
        checkpoint: Mapping[str, Tensor],
        architecture: Architecture,
        shard: Shard,
    ) -> None:
        raise AssertionError("there is no such architecture")
