"""Ministral 3, the language model alone."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import mistral
from rlframe.models.families.base import QueryScaling, faults_to_error


class Ministral3(mistral.Mistral):
    """Mistral with yarn, and with queries that grow beyond the length of pretraining."""

    rope_kinds = ("default", "yarn")

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        rope = hf.get("rope_parameters") or {}
        needed = ("llama_4_scaling_beta", "original_max_position_embeddings")
        faults_to_error(hf, [f"rope_parameters.{key} is missing" for key in needed if rope.get(key) is None])
        scaling = QueryScaling(strength=rope["llama_4_scaling_beta"], tokens=rope["original_max_position_embeddings"])
        # transformers' Ministral3Config defaults to 128 and to no window.
        features = super().features({"sliding_window": None, **hf})
        return features | {"head_dim": hf.get("head_dim") or 128, "query_scaling": scaling}


FAMILY = Ministral3()
