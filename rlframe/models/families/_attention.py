"""The two kinds of attention: multi-head latent attention, and attention with query, key and value projections fused by
KV group.

Megatron's layouts, checked by shape and by logits: QKV is stored per KV group (its query heads, then its key, then its
value) and tensor parallelism takes whole groups. Projections out of a latent vector are split by heads; projections
into it are replicated. The projection back to H is split by columns.
"""

from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, columns, rows
from rlframe.models.families.base import Architecture, MLADimensions, Shard


class GroupedAttention(LayerSpec):
    """Query, key, value and output projections, with biases, head norms and sinks if the model has them."""

    def tensors(self, a: Architecture) -> Shapes:
        queries, keys = a.num_attention_heads * a.head_dim, a.num_kv_heads * a.head_dim
        shapes: Shapes = {}
        for name, width in (("q", queries * (2 if a.output_gate else 1)), ("k", keys), ("v", keys)):
            shapes[f"self_attn.{name}_proj.weight"] = (width, a.hidden_size)
            if a.qkv_bias:
                shapes[f"self_attn.{name}_proj.bias"] = (width,)
        shapes["self_attn.o_proj.weight"] = (a.hidden_size, queries)
        if a.linear_bias:
            shapes["self_attn.o_proj.bias"] = (a.hidden_size,)
        if a.qk_norm:
            of_queries, of_keys = (queries, keys) if a.whole_qk_norm else (a.head_dim, a.head_dim)
            shapes |= {"self_attn.q_norm.weight": (of_queries,), "self_attn.k_norm.weight": (of_keys,)}
        if a.sinks:
            shapes["self_attn.sinks"] = (a.num_attention_heads,)
        return shapes

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        queries = a.num_attention_heads * a.head_dim // shard.tp_size
        of_queries = 2 if a.output_gate else 1
        fused = (of_queries * a.num_attention_heads + 2 * a.num_kv_heads) * a.head_dim // shard.tp_size
        shapes: Shapes = {
            "self_attention.linear_proj.weight": (a.hidden_size, queries),
            "self_attention.linear_qkv.weight": (fused, a.hidden_size),
        }
        if a.linear_bias:
            shapes["self_attention.linear_proj.bias"] = (a.hidden_size,)
        if a.qkv_bias:
            shapes["self_attention.linear_qkv.bias"] = (fused,)
        if a.qk_norm:
            keys = a.num_kv_heads * a.head_dim // shard.tp_size
            of_queries, of_keys = (queries, keys) if a.whole_qk_norm else (a.head_dim, a.head_dim)
            shapes["self_attention.q_layernorm.weight"] = (of_queries,)
            shapes["self_attention.k_layernorm.weight"] = (of_keys,)
        if a.sinks:
            shapes["self_attention.core_attention.softmax_offset"] = (a.num_attention_heads // shard.tp_size,)
        return shapes

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("self_attention."), checkpoint.within("self_attn.")
        groups = a.num_kv_heads // shard.tp_size
        queries = a.num_attention_heads // a.num_kv_heads
        of_rank = slice(shard.tp_rank * groups, (shard.tp_rank + 1) * groups)
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            # [groups, heads, head_dim, ...]: per group its query heads, their gates, its key, its value.
            fused = ours[f"linear_qkv.{kind}"].unflatten(0, (groups, -1, a.head_dim))
            for name, part in {"k": fused[:, -2:-1], "v": fused[:, -1:]}.items():
                part.copy_(theirs[f"{name}_proj.{kind}"].unflatten(0, (a.num_kv_heads, 1, a.head_dim))[of_rank])
            # On disk a head's gate follows the head.
            of_query = theirs[f"q_proj.{kind}"].unflatten(0, (a.num_kv_heads, queries, -1, a.head_dim))[of_rank]
            fused[:, :queries].copy_(of_query[:, :, 0])
            if a.output_gate:
                fused[:, queries : 2 * queries].copy_(of_query[:, :, 1])
        ours["linear_proj.weight"].copy_(columns(theirs["o_proj.weight"], shard.tp_rank, shard.tp_size))
        if a.linear_bias:
            ours["linear_proj.bias"].copy_(theirs["o_proj.bias"])
        if a.qk_norm:
            for name in ("q", "k"):
                norm = theirs[f"{name}_norm.weight"]
                own = rows(norm, shard.tp_rank, shard.tp_size) if a.whole_qk_norm else norm
                ours[f"{name}_layernorm.weight"].copy_(own)
        if a.sinks:
            ours["core_attention.softmax_offset"].copy_(rows(theirs["sinks"], shard.tp_rank, shard.tp_size))


class LatentAttention(LayerSpec):
    """DeepSeek's projections down to the latent vectors and up from them. Rotary rows keep their order: Megatron turns
    the interleaved pairs into halves when it applies the positions."""

    def tensors(self, a: Architecture) -> Shapes:
        latent = _latent(a)
        heads, hidden = a.num_attention_heads, a.hidden_size
        if latent.query_rank is None:
            shapes: Shapes = {"self_attn.q_proj.weight": (heads * a.head_dim, hidden)}
        else:
            shapes = {
                "self_attn.q_a_proj.weight": (latent.query_rank, hidden),
                "self_attn.q_a_layernorm.weight": (latent.query_rank,),
                "self_attn.q_b_proj.weight": (heads * a.head_dim, latent.query_rank),
            }
        return shapes | {
            "self_attn.kv_a_proj_with_mqa.weight": (latent.kv_rank + latent.rotary_head_dim, hidden),
            "self_attn.kv_a_layernorm.weight": (latent.kv_rank,),
            "self_attn.kv_b_proj.weight": (heads * (latent.plain_head_dim + latent.value_head_dim), latent.kv_rank),
            "self_attn.o_proj.weight": (hidden, heads * latent.value_head_dim),
        }

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        shapes = self.tensors(a)
        cut: Shapes = {}
        for name, target, axis in _latent_names(a):
            shape = list(shapes[f"self_attn.{name}"])
            if axis is not None:
                shape[axis] //= shard.tp_size
            cut[f"self_attention.{target}"] = tuple(shape)
        return cut

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("self_attention."), checkpoint.within("self_attn.")
        for name, target, axis in _latent_names(a):
            tensor = theirs[name]
            ours[target].copy_(tensor if axis is None else tensor.chunk(shard.tp_size, dim=axis)[shard.tp_rank])


def _latent(a: Architecture) -> MLADimensions:
    assert a.latent is not None
    return a.latent


def _latent_names(a: Architecture) -> list[tuple[str, str, int | None]]:
    """Returns (Hugging Face name, Megatron name, axis that tensor parallelism splits) of each tensor."""
    queries: list[tuple[str, str, int | None]] = [("q_proj.weight", "linear_q_proj.weight", 0)]
    if _latent(a).query_rank is not None:
        queries = [
            ("q_a_proj.weight", "linear_q_down_proj.weight", None),
            ("q_a_layernorm.weight", "q_layernorm.weight", None),
            ("q_b_proj.weight", "linear_q_up_proj.weight", 0),
        ]
    return [
        *queries,
        ("kv_a_proj_with_mqa.weight", "linear_kv_down_proj.weight", None),
        ("kv_a_layernorm.weight", "kv_layernorm.weight", None),
        ("kv_b_proj.weight", "linear_kv_up_proj.weight", 0),
        ("o_proj.weight", "linear_proj.weight", 1),
    ]
