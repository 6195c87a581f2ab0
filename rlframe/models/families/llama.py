"""Llama 2 and 3, and models saved in their format."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder


class Llama(Decoder):
    """The plain decoder. Llama 3.1 and later scale their rotary positions by wavelength."""

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {}


FAMILY = Llama()
