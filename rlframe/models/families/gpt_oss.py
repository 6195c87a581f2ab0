"""GPT-OSS 20B and 120B, as transformers stores them in bfloat16, or on the hub in MXFP4."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, under
from rlframe.models.families.base import Architecture, ClampedGlu, Shard, faults_to_error


class StackedExperts(LayerSpec):
    """All experts of a layer in one tensor, transposed, with alternating gate and up columns.

    The first matrix keeps that order of its rows, and rlframe's activation takes every second row. An expert is then
    one box of the tensor; gate rows above up rows would make one box per row.
    """

    def tensors(self, a: Architecture) -> Shapes:
        experts, hidden, width = a.num_experts, a.hidden_size, a.expert_ffn_hidden_size
        return {
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * width),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * width),
            "mlp.experts.down_proj": (experts, width, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        hidden, width = a.hidden_size, a.expert_ffn_hidden_size
        one: Shapes = {
            "linear_fc1.weight": (2 * width, hidden),
            "linear_fc1.bias": (2 * width,),
            "linear_fc2.weight": (hidden, width),
            "linear_fc2.bias": (hidden,),
        }
        shapes: Shapes = {"mlp.router.weight": (a.num_experts, hidden), "mlp.router.bias": (a.num_experts,)}
        for expert in range(a.num_experts // shard.ep_size):
            shapes |= under(f"mlp.experts.local_experts.{expert}.", one)
        return shapes

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("mlp."), checkpoint.within("mlp.")
        for kind in ("weight", "bias"):
            ours[f"router.{kind}"].copy_(theirs[f"router.{kind}"])
        local = a.num_experts // shard.ep_size
        for expert in range(local):
            mine = ours.within(f"experts.local_experts.{expert}.")
            for target, source in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                index = shard.ep_rank * local + expert
                mine[f"{target}.weight"].t().copy_(theirs[f"experts.{source}"][index])
                mine[f"{target}.bias"].copy_(theirs[f"experts.{source}_bias"][index])


class GptOss(Decoder):
    """Sinks, a sliding window in every second layer, biases everywhere, and a clamped GLU."""

    experts = StackedExperts()
    default_theta = 150000.0
    default_kv_heads = 8
    default_rope = MappingProxyType({
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    })  # fmt: skip
    rope_kinds = ("default", "yarn")
    attention_bias = True
    windows = True

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        needed = ("num_local_experts", "num_experts_per_tok", "sliding_window")
        faults = [f"{key} is missing" for key in needed if not hf.get(key)]
        if not hf.get("attention_bias", True):
            faults.append("attention_bias must be true: Megatron-Core has one switch for these and the experts' biases")
        faults_to_error(hf, faults)
        layers = hf["num_hidden_layers"]
        kinds = hf.get("layer_types") or [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
        return {
            "head_dim": hf.get("head_dim") or 64,
            "qkv_bias": True,
            "linear_bias": True,
            "sinks": True,
            "sliding_window": hf["sliding_window"],
            "window_layers": tuple(kind == "sliding_attention" for kind in kinds),
            "num_experts": hf["num_local_experts"],
            "experts_per_token": hf["num_experts_per_tok"],
            "expert_ffn_hidden_size": hf["intermediate_size"],
            "clamped_glu": ClampedGlu(alpha=hf.get("swiglu_alpha") or 1.702, limit=hf.get("swiglu_limit") or 7.0),
            "moe_layers": (True,) * layers,
        }


FAMILY = GptOss()
