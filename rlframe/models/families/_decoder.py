"""The decoder most families share: RMSNorm, rotary attention with fused QKV, gated MLP or experts.

Megatron's layouts, checked by shape and by logits: QKV is stored per KV group (its query heads, then its key, then its
value) and tensor parallelism takes whole groups; the first MLP matrix is this rank's gate rows over its up rows;
projections back to H are cut by columns; vocabulary rows are padded; norms and the router are whole everywhere.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlframe.models.families.base import Architecture, Family, Shard, faults_to_error

LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Decoder(Family):
    """Base of the families whose checkpoints use the names of Llama."""

    @abstractmethod
    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `Architecture` in which this family differs from Llama."""

    def architecture(self, hf: Mapping[str, Any]) -> Architecture:
        faults = [f"{key} is missing" for key in _REQUIRED if key not in hf]
        faults_to_error(hf, faults)
        rope_theta, rope_scaling, rope_faults = _rope(hf)
        faults_to_error(hf, _unsupported(hf) + rope_faults)
        heads = hf["num_attention_heads"]
        fields = {
            "model_type": hf["model_type"],
            "hidden_size": hf["hidden_size"],
            "num_layers": hf["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_kv_heads": hf.get("num_key_value_heads") or heads,
            "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
            "ffn_hidden_size": hf["intermediate_size"],
            "vocab_size": hf["vocab_size"],
            "max_positions": hf["max_position_embeddings"],
            "rms_norm_eps": hf["rms_norm_eps"],
            "rope_theta": rope_theta,
            "rope_scaling": rope_scaling,
            "tie_embeddings": bool(hf.get("tie_word_embeddings")),
            "moe_layers": (False,) * hf["num_hidden_layers"],
        }
        return Architecture(**(fields | self.features(hf)))

    def tensors(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        a = architecture
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
        widths = {"q": a.num_attention_heads * a.head_dim, "k": a.num_kv_heads * a.head_dim}
        widths["v"] = widths["k"]
        for layer in range(a.num_layers):
            prefix = f"model.layers.{layer}."
            for name, width in widths.items():
                shapes[f"{prefix}self_attn.{name}_proj.weight"] = (width, a.hidden_size)
                if a.qkv_bias:
                    shapes[f"{prefix}self_attn.{name}_proj.bias"] = (width,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (a.hidden_size, widths["q"])
            if a.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (a.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (a.head_dim,)
            if a.moe_layers[layer]:
                shapes[f"{prefix}mlp.gate.weight"] = (a.num_experts, a.hidden_size)
                for expert in range(a.num_experts):
                    shapes |= _mlp_shapes(f"{prefix}mlp.experts.{expert}.", a.hidden_size, a.expert_ffn_hidden_size)
            else:
                shapes |= _mlp_shapes(f"{prefix}mlp.", a.hidden_size, a.ffn_hidden_size)
            shapes[f"{prefix}input_layernorm.weight"] = (a.hidden_size,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (a.hidden_size,)
        shapes["model.norm.weight"] = (a.hidden_size,)
        if not a.tie_embeddings:
            shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
        return shapes

    def parameters(self, architecture: Architecture, shard: Shard) -> dict[str, tuple[int, ...]]:
        a, hidden = architecture, (architecture.hidden_size,)
        vocabulary = (shard.padded_vocab_size // shard.tp_size, a.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {}
        if shard.has_embedding:
            shapes["embedding.word_embeddings.weight"] = vocabulary
        for layer in range(shard.num_layers):
            prefix = f"decoder.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = hidden
            shapes |= _attention_parameters(f"{prefix}self_attention.", a, shard.tp_size)
            shapes[f"{prefix}pre_mlp_layernorm.weight"] = hidden
            if a.moe_layers[shard.first_layer + layer]:
                shapes[f"{prefix}mlp.router.weight"] = (a.num_experts, a.hidden_size)
                width = a.expert_ffn_hidden_size // shard.etp_size
                for expert in range(a.num_experts // shard.ep_size):
                    shapes |= _mlp_parameters(f"{prefix}mlp.experts.local_experts.{expert}.", a.hidden_size, width)
            else:
                shapes |= _mlp_parameters(f"{prefix}mlp.", a.hidden_size, a.ffn_hidden_size // shard.tp_size)
        if shard.has_output:
            shapes["decoder.final_layernorm.weight"] = hidden
            if not (a.tie_embeddings and shard.has_embedding):
                shapes["output_layer.weight"] = vocabulary
        return shapes

    def load(
        self,
        parameters: Mapping[str, Tensor],
        checkpoint: Mapping[str, Tensor],
        architecture: Architecture,
        shard: Shard,
    ) -> None:
        if shard.has_embedding:
            _load_vocabulary(
                parameters["embedding.word_embeddings.weight"], checkpoint["model.embed_tokens.weight"], shard
            )
        for layer in range(shard.num_layers):
            target, source = f"decoder.layers.{layer}.", f"model.layers.{shard.first_layer + layer}."
            _load_attention(parameters, checkpoint, target, source, architecture, shard)
            if architecture.moe_layers[shard.first_layer + layer]:
                _load_experts(parameters, checkpoint, target, source, architecture, shard)
            else:
                _load_mlp(parameters, checkpoint, f"{target}mlp.", f"{source}mlp.", shard.tp_rank, shard.tp_size)
        if shard.has_output:
            parameters["decoder.final_layernorm.weight"].copy_(checkpoint["model.norm.weight"])
        # Tied and on one stage, Megatron has no output parameter; tied and on two, the last holds a copy.
        if "output_layer.weight" in parameters:
            head = "model.embed_tokens.weight" if architecture.tie_embeddings else "lm_head.weight"
            _load_vocabulary(parameters["output_layer.weight"], checkpoint[head], shard)


_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def _unsupported(hf: Mapping[str, Any]) -> list[str]:
    """What of config.json these models would compute wrongly without a sign."""
    faults = []
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ()):
        faults.append("a sliding window is in use, which is not supported: set use_sliding_window to false")
    faults += [f"{key} is true, which is not supported" for key in ("attention_bias", "mlp_bias") if hf.get(key)]
    if hf.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act must be silu, got {hf['hidden_act']!r}")
    if hf.get("quantization_config"):
        faults.append("quantization_config is set: convert the checkpoint to bfloat16 first")
    return faults


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None, list[str]]:
    """(theta, scaling, faults), from rope_parameters as transformers 5 writes it or from the older two keys."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    partial = rope.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    faults = [] if partial == 1.0 else [f"partial_rotary_factor must be 1, got {partial}"]
    if kind == "default":
        return theta, None, faults
    if kind != "llama3":
        return theta, None, [*faults, f"rope_type must be default or llama3, got {kind!r}"]
    faults += [f"rope_type llama3 needs {key}" for key in LLAMA3_ROPE if key not in rope]
    return theta, {"rope_type": kind} | {key: rope[key] for key in LLAMA3_ROPE if key in rope}, faults


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _attention_parameters(prefix: str, a: Architecture, tp: int) -> dict[str, tuple[int, ...]]:
    queries = a.num_attention_heads * a.head_dim // tp
    fused = (a.num_attention_heads + 2 * a.num_kv_heads) * a.head_dim // tp
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}linear_proj.weight": (a.hidden_size, queries),
        f"{prefix}linear_qkv.weight": (fused, a.hidden_size),
    }
    if a.qkv_bias:
        shapes[f"{prefix}linear_qkv.bias"] = (fused,)
    if a.qk_norm:
        shapes[f"{prefix}q_layernorm.weight"] = shapes[f"{prefix}k_layernorm.weight"] = (a.head_dim,)
    return shapes


def _mlp_parameters(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}linear_fc1.weight": (2 * width, hidden), f"{prefix}linear_fc2.weight": (hidden, width)}


def _load_vocabulary(parameter: Tensor, tensor: Tensor, shard: Shard) -> None:
    """Rows of the padded vocabulary: those beyond the real one are zeroed."""
    rows = shard.padded_vocab_size // shard.tp_size
    first = min(shard.tp_rank * rows, tensor.shape[0])
    present = min(rows, tensor.shape[0] - first)
    parameter[:present].copy_(tensor[first : first + present])
    if present < rows:
        parameter[present:].zero_()


def _load_attention(
    parameters: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    target: str,
    source: str,
    architecture: Architecture,
    shard: Shard,
) -> None:
    """Both norms of the layer, fused QKV by group, and the projection back."""
    groups = architecture.num_kv_heads // shard.tp_size
    queries = architecture.num_attention_heads // architecture.num_kv_heads
    mine = slice(shard.tp_rank * groups, (shard.tp_rank + 1) * groups)
    for kind in ("weight", "bias") if architecture.qkv_bias else ("weight",):
        # [groups, queries + 2, head_dim, ...]: per group its query heads, its key, its value.
        fused = parameters[f"{target}self_attention.linear_qkv.{kind}"].unflatten(
            0, (groups, queries + 2, architecture.head_dim)
        )
        heads = {"q": fused[:, :queries], "k": fused[:, queries : queries + 1], "v": fused[:, queries + 1 :]}
        for name, part in heads.items():
            tensor = checkpoint[f"{source}self_attn.{name}_proj.{kind}"]
            part.copy_(tensor.unflatten(0, (architecture.num_kv_heads, -1, architecture.head_dim))[mine])
    projection = checkpoint[f"{source}self_attn.o_proj.weight"].chunk(shard.tp_size, dim=1)[shard.tp_rank]
    parameters[f"{target}self_attention.linear_proj.weight"].copy_(projection)
    if architecture.qk_norm:
        for name in ("q", "k"):
            norm = checkpoint[f"{source}self_attn.{name}_norm.weight"]
            parameters[f"{target}self_attention.{name}_layernorm.weight"].copy_(norm)
    parameters[f"{target}input_layernorm.weight"].copy_(checkpoint[f"{source}input_layernorm.weight"])
    parameters[f"{target}pre_mlp_layernorm.weight"].copy_(checkpoint[f"{source}post_attention_layernorm.weight"])


def _load_mlp(
    parameters: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    target: str,
    source: str,
    rank: int,
    size: int,
) -> None:
    """Gate rows over up rows, both cut for `rank`, and the columns of the matrix back."""
    gate, up = parameters[f"{target}linear_fc1.weight"].chunk(2)
    gate.copy_(checkpoint[f"{source}gate_proj.weight"].chunk(size)[rank])
    up.copy_(checkpoint[f"{source}up_proj.weight"].chunk(size)[rank])
    down = checkpoint[f"{source}down_proj.weight"].chunk(size, dim=1)[rank]
    parameters[f"{target}linear_fc2.weight"].copy_(down)


def _load_experts(
    parameters: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    target: str,
    source: str,
    architecture: Architecture,
    shard: Shard,
) -> None:
    """The router whole, and this rank's run of experts."""
    parameters[f"{target}mlp.router.weight"].copy_(checkpoint[f"{source}mlp.gate.weight"])
    local = architecture.num_experts // shard.ep_size
    for expert in range(local):
        _load_mlp(
            parameters,
            checkpoint,
            f"{target}mlp.experts.local_experts.{expert}.",
            f"{source}mlp.experts.{shard.ep_rank * local + expert}.",
            shard.etp_rank,
            shard.etp_size,
        )
