"""Llama 4 Scout and Maverick, the language model alone."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._decoder import Decoder
from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, columns, rows, under
from rlframe.models.families._mlp import Mlp, Projections, fused
from rlframe.models.families.base import Architecture, QueryScaling, Shard, faults_to_error

MODULE = "feed_forward."


class StackedExperts(LayerSpec):
    """All experts of a layer in one tensor, transposed, gate columns before up columns, and a shared expert."""

    def tensors(self, a: Architecture) -> Shapes:
        experts, hidden, width = a.num_experts, a.hidden_size, a.expert_ffn_hidden_size
        own: Shapes = {
            "experts.gate_up_proj": (experts, hidden, 2 * width),
            "experts.down_proj": (experts, width, hidden),
            "router.weight": (experts, hidden),
        }
        own |= under("shared_expert.", Projections().tensors(hidden, a.shared_ffn_hidden_size))
        return under(MODULE, own)

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        shapes: Shapes = {"router.weight": (a.num_experts, a.hidden_size)}
        one = fused(a.hidden_size, a.expert_ffn_hidden_size // shard.etp_size)
        for expert in range(a.num_experts // shard.ep_size):
            shapes |= under(f"experts.local_experts.{expert}.", one)
        shapes |= under("shared_experts.", fused(a.hidden_size, a.shared_ffn_hidden_size // shard.tp_size))
        return under("mlp.", shapes)

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("mlp."), checkpoint.within(MODULE)
        ours["router.weight"].copy_(theirs["router.weight"])
        local = a.num_experts // shard.ep_size
        for expert in range(local):
            mine, index = ours.within(f"experts.local_experts.{expert}."), shard.ep_rank * local + expert
            halves = zip(
                mine["linear_fc1.weight"].chunk(2), theirs["experts.gate_up_proj"][index].chunk(2, dim=1), strict=True
            )
            for half, source in halves:
                half.t().copy_(columns(source, shard.etp_rank, shard.etp_size))
            down = rows(theirs["experts.down_proj"][index], shard.etp_rank, shard.etp_size)
            mine["linear_fc2.weight"].t().copy_(down)
        shared = theirs.within("shared_expert.")
        Projections().load(ours.within("shared_experts."), shared, shard.tp_rank, shard.tp_size)


class Llama4Text(Decoder):
    """Attention in chunks with positions, attention over everything without, and experts whose input is scaled."""

    mlp = Mlp(MODULE)
    experts = StackedExperts()
    default_theta = 500000.0
    default_kv_heads = 8
    rope_kinds = ("default", "llama3")
    layer_kinds = ("full_attention", "chunked_attention")

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        needed = ("intermediate_size_mlp", "num_local_experts", "num_experts_per_tok")
        faults = [f"{key} is missing" for key in needed if not hf.get(key)]
        if hf.get("num_experts_per_tok", 1) != 1:
            faults.append(
                f"num_experts_per_tok must be 1: Megatron-Core scales the input of one expert, got "
                f"{hf['num_experts_per_tok']}"
            )
        faults_to_error(hf, faults)
        layers = hf["num_hidden_layers"]
        # A 1 stands for a layer with positions. Published files have an empty list.
        interval = hf.get("no_rope_layer_interval") or 4
        with_rope = hf.get("no_rope_layers") or [(layer + 1) % interval for layer in range(layers)]
        chunk = hf.get("attention_chunk_size", 8192)
        kinds = hf.get("layer_types") or ["chunked_attention" if rope else "full_attention" for rope in with_rope]
        step = hf.get("interleave_moe_layer_step") or 1
        sparse = hf.get("moe_layers")
        sparse = set(range(step - 1, layers, step) if sparse is None else sparse)
        strength = 0.1 if (scale := hf.get("attn_scale")) is None else scale
        scaling = QueryScaling(strength=strength, tokens=hf.get("floor_scale") or 8192, shift=1)
        without_rope = tuple(not rope for rope in with_rope)
        return {
            "head_dim": hf.get("head_dim") or 128,
            "rope_interleaved": True,
            "no_rope_layers": without_rope,
            "query_scaling": scaling if hf.get("attn_temperature_tuning", True) and any(without_rope) else None,
            "qk_l2_norm": hf.get("use_qk_norm", True),
            "attention_chunk": chunk or 0,
            "chunk_layers": tuple(kind == "chunked_attention" for kind in kinds) if chunk else (),
            "ffn_hidden_size": hf["intermediate_size_mlp"],
            "num_experts": hf["num_local_experts"],
            "experts_per_token": 1,
            "expert_ffn_hidden_size": hf["intermediate_size"],
            "shared_ffn_hidden_size": hf["intermediate_size"],
            "sigmoid_router": True,
            "router_bias": False,
            "scores_on_input": True,
            "moe_layers": tuple(layer in sparse for layer in range(layers)),
        }


FAMILY = Llama4Text()
