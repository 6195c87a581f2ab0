"""OLMo 3."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import olmo2
from rlframe.models.families._window_rope import WindowRopeDecoder


class Olmo3(WindowRopeDecoder):
    """OLMo 2 with a sliding window in three of four layers, and yarn in the others."""

    norms = olmo2.NORMS
    default_theta = 500000.0
    window_theta = 500000.0
    pattern = 4

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return olmo2.FEATURES | super().features(hf)


FAMILY = Olmo3()
