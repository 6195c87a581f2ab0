"""Phi-3 and Phi-4 without longrope: Phi-3-mini-4k, Phi-3-medium-4k, Phi-4."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._attention import GroupedAttention
from rlframe.models.families._decoder import Decoder
from rlframe.models.families._layer_specs import Scope, Shapes
from rlframe.models.families._mlp import Mlp
from rlframe.models.families.base import Architecture, Shard, faults_to_error

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"


class FusedAttention(GroupedAttention):
    """All queries above all keys above all values in one tensor."""

    def tensors(self, a: Architecture) -> Shapes:
        rest = super().tensors(a)
        width = sum(rest.pop(f"self_attn.{name}_proj.weight")[0] for name in "qkv")
        return rest | {QKV: (width, a.hidden_size)}

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        queries, keys = a.num_attention_heads * a.head_dim, a.num_kv_heads * a.head_dim
        parts = zip("qkv", checkpoint[QKV].split((queries, keys, keys)), strict=True)
        named = {f"self_attn.{name}_proj.weight": part for name, part in parts}
        named["self_attn.o_proj.weight"] = checkpoint["self_attn.o_proj.weight"]
        super().load(parameters, Scope(named, ""), a, shard)


class FusedMlp(Mlp):
    """Gate rows above up rows in one tensor."""

    def tensors(self, a: Architecture) -> Shapes:
        down = super().tensors(a)["mlp.down_proj.weight"]
        return {GATE_UP: (2 * a.ffn_hidden_size, a.hidden_size), "mlp.down_proj.weight": down}

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        gate, up = checkpoint[GATE_UP].chunk(2)
        named = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
        named["mlp.down_proj.weight"] = checkpoint["mlp.down_proj.weight"]
        super().load(parameters, Scope(named, ""), a, shard)


class Phi3(Decoder):
    """The plain decoder with fused matrices, whose queries may see a window of tokens only."""

    attention = FusedAttention()
    mlp = FusedMlp()
    rope_kinds = ("default",)  # transformers makes longrope of yarn and knows no other
    partial_rope = True
    windows = True

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        if hf.get("layer_types"):
            faults_to_error(hf, ["layer_types is set, which transformers does not read: remove it"])
        if not (window := hf.get("sliding_window")):
            return {}
        return {"sliding_window": window, "window_layers": (True,) * hf["num_hidden_layers"]}


FAMILY = Phi3()
