"""Qwen2 and Qwen2.5."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder


class Qwen2(Decoder):
    """Query, key and value always have a bias; no other layer has one."""

    default_kv_heads = 32

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"qkv_bias": True}


FAMILY = Qwen2()
