"""Rules for every value of config.json that a family reads."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

MOST_WIDTH = 2**20
MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000


class Rule(NamedTuple):
    """A rule for a value: its text, and a function that checks it."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def whole(least: int, most: int = MOST_WIDTH) -> Rule:
    """Returns the rule for a whole number from `least` to `most`."""
    return Rule(f"a whole number from {least} to {most}", lambda value: _is_whole(value) and least <= value <= most)


def number(above: float, most: float) -> Rule:
    """Returns the rule for a number above `above`, at most `most`."""
    return Rule(
        f"a number above {above:g}, at most {most:g}", lambda value: _is_number(value) and above < value <= most
    )


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("text", lambda value: isinstance(value, str))
SECTION = Rule("a section of named values", lambda value: isinstance(value, dict))
TEXTS = Rule("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))
WHOLES = Rule("a list of whole numbers", lambda value: isinstance(value, list) and all(_is_whole(one) for one in value))
PATTERN = Rule(
    f"a whole number from 0 to {MOST_LAYERS}, or text",
    lambda value: isinstance(value, str) or (_is_whole(value) and 0 <= value <= MOST_LAYERS),
)
SCALE = number(0, 1e6)
FROM_ZERO = Rule("a number from 0 to 1e6", lambda value: _is_number(value) and 0 <= value <= 1e6)

FIELDS: dict[str, Rule] = {
    "hidden_size": whole(1),
    "num_hidden_layers": whole(1, MOST_LAYERS),
    "num_attention_heads": whole(1),
    "num_key_value_heads": whole(1),
    "head_dim": whole(2),
    "intermediate_size": whole(1),
    "vocab_size": whole(2, 2**30),
    "max_position_embeddings": whole(1, 2**28),
    # Above 0.01, epsilon no longer guards against rounding but shrinks every norm.
    "rms_norm_eps": number(0, 0.01),
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "hidden_act": TEXT,
    "is_causal": FLAG,
    "quantization_config": SECTION,
    "use_sliding_window": FLAG,
    "sliding_window": whole(0, 2**28),
    "layer_types": TEXTS,
    "rope_parameters": SECTION,
    "rope_scaling": SECTION,
    "rope_theta": number(0, 1e15),
    "partial_rotary_factor": number(0, 1),
    "num_experts": whole(0, MOST_EXPERTS),
    "num_local_experts": whole(0, MOST_EXPERTS),
    "n_routed_experts": whole(1, MOST_EXPERTS),
    "num_experts_per_tok": whole(1, MOST_EXPERTS),
    "moe_intermediate_size": whole(1),
    "n_shared_experts": whole(0, MOST_EXPERTS),
    "norm_topk_prob": FLAG,
    "mlp_only_layers": WHOLES,
    "decoder_sparse_step": whole(1, MOST_LAYERS),
    "first_k_dense_replace": whole(0, MOST_LAYERS),
    "mlp_layer_types": TEXTS,
    "n_group": whole(1, MOST_EXPERTS),
    "topk_group": whole(1, MOST_EXPERTS),
    "routed_scaling_factor": SCALE,
    "num_nextn_predict_layers": whole(0, MOST_LAYERS),
    "mtp_num_hidden_layers": whole(0, MOST_LAYERS),
    "kv_lora_rank": whole(1),
    "q_lora_rank": whole(1),
    "qk_nope_head_dim": whole(1),
    "qk_rope_head_dim": whole(2),
    "v_head_dim": whole(1),
    "rope_interleave": FLAG,
    "index_topk": whole(1, 2**28),
    "index_n_heads": whole(1),
    "index_head_dim": whole(2),
    "index_topk_freq": whole(1, MOST_LAYERS),
    "indexer_types": TEXTS,
    "indexer_rope_interleave": FLAG,
    "use_qk_norm": FLAG,
    "rotary_dim": whole(2),
    "attn_type_list": WHOLES,
    "shared_expert_intermediate_size": whole(1),
    "full_attention_interval": whole(1, MOST_LAYERS),
    "linear_conv_kernel_dim": whole(1, 1024),
    "linear_key_head_dim": whole(1),
    "linear_value_head_dim": whole(1),
    "linear_num_key_heads": whole(1),
    "linear_num_value_heads": whole(1),
    "swiglu_alpha": SCALE,
    "swiglu_limit": SCALE,
    "attention_out_bias": FLAG,
    "no_rope_layers": WHOLES,
    "no_rope_layer_interval": whole(1, MOST_LAYERS),
    "intermediate_size_mlp": whole(1),
    "interleave_moe_layer_step": whole(1, MOST_LAYERS),
    "moe_layers": WHOLES,
    "attention_chunk_size": whole(1, 2**28),
    "floor_scale": whole(1, 2**28),
    "attn_scale": FROM_ZERO,
    "sliding_window_pattern": PATTERN,
    "rope_local_base_freq": number(0, 1e15),
    "query_pre_attn_scalar": number(0, 1e6),
    "hidden_activation": TEXT,
    "use_bidirectional_attention": FLAG,
    "embedding_multiplier": SCALE,
    "attention_multiplier": SCALE,
    "residual_multiplier": SCALE,
    "logits_scaling": SCALE,
}
"""Rules by key. A family decides about a key that is missing or null."""
ROPE: dict[str, Rule] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": number(0, 1e15),
    "partial_rotary_factor": number(0, 1),
    "factor": number(0, 1e6),
    "low_freq_factor": SCALE,
    "high_freq_factor": SCALE,
    "original_max_position_embeddings": whole(1, 2**28),
    "beta_fast": SCALE,
    "beta_slow": SCALE,
    "mscale": FROM_ZERO,
    "mscale_all_dim": FROM_ZERO,
    "truncate": FLAG,
    "attention_factor": number(0, 1e6),
    "llama_4_scaling_beta": FROM_ZERO,
}
"""Rules for the values of rope_parameters and rope_scaling."""


def faults(hf: Mapping[str, Any], *, required: Iterable[str]) -> list[str]:
    """Returns clauses such as `hidden_size must be a whole number from 1 to 1048576, got 'x'`, by FIELDS and ROPE.

    Args:
        required: keys that must be present.
    """
    found = [f"{key} is missing" for key in required if hf.get(key) is None]
    found += _broken(hf, FIELDS, "")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(hf.get(key), dict):
            found += _broken(hf[key], ROPE, f"{key}.")
            found += [
                f"{key}.{name} must not be a section" for name, value in hf[key].items() if isinstance(value, dict)
            ]
    return found


def _broken(values: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str) -> list[str]:
    return [
        f"{prefix}{key} must be {rule.words}, got {values[key]!r:.60}"
        for key, rule in rules.items()
        if values.get(key) is not None and not rule.holds(values[key])
    ]
