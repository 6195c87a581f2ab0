"""Parameter names and shapes of a Megatron rank, written out for the tests independently of the loaders."""

import torch
from torch import Tensor

from rlframe.models.families.base import Architecture, Shard

SMALL_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
"""config.json of a Qwen3-MoE whose vocabulary no tensor parallelism divides."""


def shapes(a: Architecture, shard: Shard) -> dict[str, tuple[int, ...]]:
    """Local-spec names and shapes of every parameter that a rank with this shard has."""
    vocab, hidden = shard.padded_vocab_size // shard.tp_size, a.hidden_size
    found: dict[str, tuple[int, ...]] = {}
    if shard.has_embedding:
        found["embedding.word_embeddings.weight"] = (vocab, hidden)
    for layer in range(shard.num_layers):
        prefix = f"decoder.layers.{layer}."
        norms = ["input_layernorm", "pre_mlp_layernorm"] if a.norm_before else []
        norms += ["self_attn_bda.norm", "mlp_bda.norm"] if a.norm_after else []
        found |= {f"{prefix}{norm}.weight": (hidden,) for norm in norms}
        if a.gated_delta_layers and a.gated_delta_layers[shard.first_layer + layer]:
            attention = gated_delta_shapes(a, shard.tp_size)
        else:
            attention = latent_shapes(a, shard.tp_size) if a.latent else attention_shapes(a, shard.tp_size)
        found |= {f"{prefix}self_attention.{name}": shape for name, shape in attention.items()}
        if a.moe_layers[shard.first_layer + layer]:
            mlp = expert_shapes(a, shard)
        else:
            width = a.ffn_hidden_size // shard.tp_size
            mlp = {"linear_fc1.weight": (2 * width, hidden), "linear_fc2.weight": (hidden, width)}
        found |= {f"{prefix}mlp.{name}": shape for name, shape in mlp.items()}
    if shard.has_output:
        found["decoder.final_layernorm.weight"] = (hidden,)
        if not (a.tie_embeddings and shard.has_embedding):
            found["output_layer.weight"] = (vocab, hidden)
    return found


def attention_shapes(a: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
    """Of one layer's attention."""
    width, queries = (a.num_attention_heads + 2 * a.num_kv_heads) * a.head_dim, a.num_attention_heads * a.head_dim
    if a.output_gate:
        width += queries
    found: dict[str, tuple[int, ...]] = {
        "linear_qkv.weight": (width // tp, a.hidden_size),
        "linear_proj.weight": (a.hidden_size, queries // tp),
    }
    if a.qkv_bias:
        found["linear_qkv.bias"] = (width // tp,)
    if a.linear_bias:
        found["linear_proj.bias"] = (a.hidden_size,)
    if a.qk_norm:
        heads = (a.num_attention_heads // tp, a.num_kv_heads // tp) if a.whole_qk_norm else (1, 1)
        found["q_layernorm.weight"], found["k_layernorm.weight"] = ((each * a.head_dim,) for each in heads)
    if a.sinks:
        found["core_attention.softmax_offset"] = (a.num_attention_heads // tp,)
    return found


def gated_delta_shapes(a: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
    """Of one layer's gated delta net."""
    assert a.gated_delta_net
    net, hidden = a.gated_delta_net, a.hidden_size
    keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
    return {
        # Queries, keys, values, gates, and two numbers for each value head.
        "linear_in.weight": ((2 * keys + 2 * values + 2 * net.num_value_heads) // tp, hidden),
        "conv_weight": ((2 * keys + values) // tp, net.conv_kernel),
        "dt_bias": (net.num_value_heads // tp,),
        "A_log": (net.num_value_heads // tp,),
        "norm_weight": (net.value_head_dim,),
        "linear_out.weight": (hidden, values // tp),
    }


def latent_shapes(a: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
    """Of one layer's latent attention."""
    assert a.latent
    heads, hidden, rank = a.num_attention_heads // tp, a.hidden_size, a.latent.query_rank
    width = a.latent.plain_head_dim + a.latent.rotary_head_dim
    found: dict[str, tuple[int, ...]] = {
        "linear_kv_down_proj.weight": (a.latent.kv_rank + a.latent.rotary_head_dim, hidden),
        "kv_layernorm.weight": (a.latent.kv_rank,),
        "linear_kv_up_proj.weight": (heads * (a.latent.plain_head_dim + a.latent.value_head_dim), a.latent.kv_rank),
        "linear_proj.weight": (hidden, heads * a.latent.value_head_dim),
    }
    if a.indexer:
        index_heads, index_width = a.indexer.num_heads, a.indexer.head_dim
        assert rank
        found |= {
            "indexer.wq_b": (index_heads * index_width, rank),
            "indexer.wk": (index_width, hidden),
            "indexer.k_norm_weight": (index_width,),
            "indexer.k_norm_bias": (index_width,),
            "indexer.weights_proj": (index_heads, hidden),
        }
    if rank is None:
        return found | {"linear_q_proj.weight": (heads * width, hidden)}
    return found | {
        "linear_q_down_proj.weight": (rank, hidden),
        "q_layernorm.weight": (rank,),
        "linear_q_up_proj.weight": (heads * width, rank),
    }


def expert_shapes(a: Architecture, shard: Shard) -> dict[str, tuple[int, ...]]:
    """Of one layer's router and experts."""
    width, hidden = a.expert_ffn_hidden_size // shard.etp_size, a.hidden_size
    found: dict[str, tuple[int, ...]] = {"router.weight": (a.num_experts, hidden)}
    if a.linear_bias:
        found["router.bias"] = (a.num_experts,)
    if a.sigmoid_router and a.router_bias:
        found["router.expert_bias"] = (a.num_experts,)
    for expert in range(a.num_experts // shard.ep_size):
        prefix = f"experts.local_experts.{expert}."
        found[f"{prefix}linear_fc1.weight"], found[f"{prefix}linear_fc2.weight"] = (2 * width, hidden), (hidden, width)
        if a.linear_bias:
            found[f"{prefix}linear_fc1.bias"], found[f"{prefix}linear_fc2.bias"] = (2 * width,), (hidden,)
    if shared := a.shared_ffn_hidden_size // shard.tp_size:
        found["shared_experts.linear_fc1.weight"] = (2 * shared, hidden)
        found["shared_experts.linear_fc2.weight"] = (hidden, shared)
    if a.shared_expert_gate:
        found["shared_experts.gate_weight"] = (1, hidden)
    return found


def empty(a: Architecture, shard: Shard, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The rank's parameters as views of one flat buffer, as Megatron's DDP keeps them; 7.0 everywhere."""
    sizes = {name: torch.Size(shape) for name, shape in shapes(a, shard).items()}
    flat = torch.full((sum(size.numel() for size in sizes.values()),), 7.0, dtype=dtype)
    parts = flat.split([size.numel() for size in sizes.values()])
    return {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}


def shards(
    a: Architecture, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, vocab_multiple: int = 1
) -> list[Shard]:
    """Every distinct shard of a layout: tensor ranks times expert ranks times pipeline ranks."""
    layers = a.num_layers // pp
    padded = -(-a.vocab_size // (vocab_multiple * tp)) * vocab_multiple * tp
    return [
        Shard(
            tp_rank=tp_rank,
            tp_size=tp,
            ep_rank=ep_rank,
            ep_size=ep,
            etp_rank=etp_rank,
            etp_size=etp,
            first_layer=pp_rank * layers,
            num_layers=layers,
            has_embedding=pp_rank == 0,
            has_output=pp_rank == pp - 1,
            padded_vocab_size=padded,
        )
        for pp_rank in range(pp)
        for ep_rank in range(ep)
        for etp_rank in range(etp)
        for tp_rank in range(tp)
    ]
