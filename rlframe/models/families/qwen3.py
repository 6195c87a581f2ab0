"""Qwen3, dense."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder


class Qwen3(Decoder):
    """Query and key heads are normalised, and their width is independent of the hidden size."""

    default_kv_heads = 32

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # transformers' Qwen3Config defaults to 128, not to hidden_size / heads.
        return {"qk_norm": True, "head_dim": hf.get("head_dim") or 128}


FAMILY = Qwen3()
