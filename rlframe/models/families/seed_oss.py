"""Seed-OSS 36B."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families.base import faults_to_error


class SeedOss(Decoder):
    """Query, key and value have a bias, and heads are wider than hidden_size over their number."""

    attention_bias = True
    default_kv_heads = 8

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        if hf.get("attention_out_bias"):
            faults_to_error(hf, ["attention_out_bias is true, which is not supported"])
        # transformers' SeedOssConfig defaults to 128 and to biases.
        return {"head_dim": hf.get("head_dim") or 128, "qkv_bias": hf.get("attention_bias", True)}


FAMILY = SeedOss()
