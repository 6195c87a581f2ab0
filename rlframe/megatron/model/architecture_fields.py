"""Settings of Megatron that an architecture needs beyond the plain decoder: configuration fields, arguments of
GPTModel."""

from typing import Any

from rlframe.megatron.model.layers.parts import gelu_tanh
from rlframe.megatron.model.layers.rope import LLAMA3
from rlframe.models.families.base import Architecture


def special_fields(architecture: Architecture, *, on_cpu: bool) -> dict[str, Any]:
    """Returns fields of TransformerConfig, or of MLATransformerConfig for latent attention. They override the
    others."""
    a, wanted = architecture, {}
    if a.linear_bias:
        wanted["add_bias_linear"] = True
    if a.clamped_glu:
        # Megatron then lets a module compute the activation: the one of `local_layers`, not Transformer Engine's.
        wanted |= {"use_te_activation_func": True, "bias_activation_fusion": False}
    if a.gelu:
        # Megatron's fused kernels have this one under the name of the exact gelu, which they replace by it.
        wanted |= {"activation_func": gelu_tanh, "bias_activation_fusion": False}
    if not fuses_rope(a, on_cpu=on_cpu):
        wanted["apply_rope_fusion"] = False
    return wanted | _attention_fields(a) | _norm_fields(a) | _router_fields(a) | _latent_fields(a)


def _attention_fields(a: Architecture) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if a.sinks:
        fields["softmax_type"] = "learnable"
    if a.window_layers:
        # Megatron counts the tokens to the left of the query.
        fields["window_size"] = (a.sliding_window - 1, 0)
        fields["window_attn_skip_freq"] = [int(windowed) for windowed in a.window_layers]
    if a.softmax_scale is not None:
        fields["softmax_scale"] = a.softmax_scale
    if a.no_rope_layers:
        fields["no_rope_freq"] = [int(without) for without in a.no_rope_layers]
    if a.rope_interleaved:
        fields["rotary_interleaved"] = True
    if a.output_gate:
        fields["attention_output_gate"] = True
    if a.gated_delta_net:
        # By it Megatron keeps layers apart in distributed checkpoints.
        fields["linear_attention_freq"] = [int(has) for has in a.gated_delta_layers]
    return fields


def fuses_rope(a: Architecture, *, on_cpu: bool) -> bool:
    """Returns False if a fused rotary embedding would be wrong or does not exist.

    Megatron-Core 0.16.1 silently drops yarn's factor on cosine and sine if packed rotary embedding is fused; for
    unpacked rows it falls back (https://github.com/NVIDIA/Megatron-LM/pull/2038). The exception is not needed any more
    once `apply_rotary_pos_emb` passes `mscale` to the fused packed function. Latent attention has a kernel of its own.
    The replacement for CPU ranks rotates whole heads, by halves, and 0.16.1 does not tell the fused function that
    neighbours are rotated.
    """
    yarn = a.rope_scaling is not None and a.rope_scaling["rope_type"] == "yarn"
    return not (yarn or a.latent or a.rope_interleaved or (on_cpu and a.rotary_percent < 1))


def _norm_fields(a: Architecture) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if a.qk_l2_norm:
        fields["qk_l2_norm"] = True
    if a.zero_centered_norms:
        fields["layernorm_zero_centered_gamma"] = True
    return fields


def _router_fields(a: Architecture) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if a.shared_ffn_hidden_size:
        fields["moe_shared_expert_intermediate_size"] = a.shared_ffn_hidden_size
    if a.shared_expert_gate:
        fields["moe_shared_expert_gate"] = True
    if a.router_scale != 1:
        fields["moe_router_topk_scaling_factor"] = a.router_scale
    if a.sigmoid_router:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": a.router_bias,
        }
    if a.scores_on_input:
        fields["moe_apply_probs_on_input"] = True
    if a.router_groups > 1:
        fields |= {
            "moe_router_num_groups": a.router_groups,
            "moe_router_group_topk": a.router_groups_per_token,
        }
    return fields


def _latent_fields(a: Architecture) -> dict[str, Any]:
    if a.latent is None:
        return {}
    fields = {
        "multi_latent_attention": True,
        "q_lora_rank": a.latent.query_rank,
        "kv_lora_rank": a.latent.kv_rank,
        "qk_head_dim": a.latent.plain_head_dim,
        "qk_pos_emb_head_dim": a.latent.rotary_head_dim,
        "v_head_dim": a.latent.value_head_dim,
        # This switch controls the norms of the latent vectors.
        "qk_layernorm": True,
        "rotary_base": a.rope_theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if (rope := a.rope_scaling) is not None:
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope["factor"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta_fast": rope["beta_fast"],
            "beta_slow": rope["beta_slow"],
            # In Megatron 1 and 0 mean that the factor alone decides.
            "mscale": 1.0 if rope["mscale"] is None else rope["mscale"],
            "mscale_all_dim": 0.0 if rope["mscale_all_dim"] is None else rope["mscale_all_dim"],
        }
    return fields


def model_arguments(architecture: Architecture) -> dict[str, Any]:
    """Returns the arguments of GPTModel about positions. Megatron fixes all numbers of Llama 3's scaling except the
    factor; other numbers are up to `rope.scale_frequencies`."""
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": architecture.rope_theta,
        "rotary_percent": architecture.rotary_percent,
    }
    scaling = architecture.rope_scaling
    if scaling is None or architecture.latent:
        return arguments
    if scaling["rope_type"] == "yarn":
        return arguments | {"position_embedding_type": "yarn"}
    if scaling["rope_type"] == "linear":
        return arguments | {"seq_len_interpolation_factor": float(scaling["factor"])}
    if scaling.items() >= LLAMA3.items():
        return arguments | {"rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    return arguments


def yarn_attributes(architecture: Architecture) -> dict[str, Any]:
    """Returns attributes that Megatron-Core 0.16.1 reads from the configuration for yarn, although they are not fields
    of it."""
    rope = architecture.rope_scaling
    if rope is None or rope["rope_type"] != "yarn" or architecture.latent:
        return {}
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope["beta_fast"],
        "yarn_beta_slow": rope["beta_slow"],
        "yarn_mscale": rope["mscale"],
        "yarn_mscale_all_dim": rope["mscale_all_dim"],
        "yarn_correction_range_round_to_int": rope["truncate"],
    }
