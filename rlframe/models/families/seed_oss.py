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
        # transformers' SeedOssConfig defaults to 128, where null means hidden_size over heads, and to biases.
        width = hf.get("head_dim", 128) or hf["hidden_size"] // hf["num_attention_heads"]
        return {"head_dim": width, "qkv_bias": hf.get("attention_bias") is not False}


FAMILY = SeedOss()
