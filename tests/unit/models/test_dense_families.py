"""Families of dense models, and Llama 4: config.json is read right, and what is refused is refused by name."""

from typing import Any

import pytest

from rlframe.models.families.base import Architecture, QueryScaling
from rlframe.models.families.exaone4 import FAMILY as EXAONE4
from rlframe.models.families.gemma3_text import FAMILY as GEMMA3
from rlframe.models.families.granite import FAMILY as GRANITE
from rlframe.models.families.llama4_text import FAMILY as LLAMA4
from rlframe.models.families.ministral3 import FAMILY as MINISTRAL3
from rlframe.models.families.mistral import FAMILY as MISTRAL
from rlframe.models.families.olmo3 import FAMILY as OLMO3
from rlframe.models.families.phi3 import FAMILY as PHI3
from rlframe.models.families.qwen3 import FAMILY as QWEN3
from rlframe.models.families.seed_oss import FAMILY as SEED_OSS
from rlframe.models.families.smollm3 import FAMILY as SMOLLM3
from rlframe.utils.errors import ConfigError

HF = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LLAMA = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128}
FAMILIES = {
    "exaone4": EXAONE4, "gemma3_text": GEMMA3, "granite": GRANITE, "llama4_text": LLAMA4, "ministral3": MINISTRAL3,
    "mistral": MISTRAL, "olmo3": OLMO3, "phi3": PHI3, "qwen3": QWEN3, "seed_oss": SEED_OSS, "smollm3": SMOLLM3,
}  # fmt: skip


def read(model_type: str, **keys: Any) -> Architecture:
    return FAMILIES[model_type].architecture({"model_type": model_type, **HF, **keys})


def test_heads_of_seed_oss_are_wide_unless_their_width_is_null() -> None:
    found = [read("seed_oss"), read("seed_oss", head_dim=None, attention_bias=None)]
    assert [(a.head_dim, a.qkv_bias) for a in found] == [(128, True), (64 // 4, True)]


def test_windows_are_in_all_layers_of_mistral_or_in_none() -> None:
    assert read("mistral", sliding_window=None).window_layers == ()
    assert read("mistral").sliding_window == 4096  # as in transformers' MistralConfig
    assert read("mistral", sliding_window=16).window_layers == (True,) * 8


def test_phi3_has_a_window_only_if_it_says_so_and_positions_in_a_part_of_a_head() -> None:
    assert read("phi3").window_layers == ()
    assert read("phi3", sliding_window=2047).window_layers == (True,) * 8
    assert read("phi3", partial_rotary_factor=0.75).rotary_percent == 0.75


def test_the_factors_of_granite_are_read_and_are_1_where_they_are_missing() -> None:
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22}
    a = read("granite", **factors, logits_scaling=16.0)  # of granite-3.1-8b-instruct
    assert (a.embedding_scale, a.softmax_scale, a.residual_scale, a.logits_divisor) == (*factors.values(), 16.0)
    a = read("granite")
    assert (a.embedding_scale, a.softmax_scale, a.residual_scale, a.logits_divisor) == (1.0,) * 4


def test_every_fourth_layer_of_smollm3_has_no_positions_and_its_head_is_the_embedding() -> None:
    a = read("smollm3")
    assert a.no_rope_layers == (False, False, False, True) * 2
    assert a.tie_embeddings and a.rope_theta == 2e6
    assert read("smollm3", no_rope_layers=[1, 0] * 4).no_rope_layers == (False, True) * 4


def test_positions_of_gemma_are_read_from_both_forms() -> None:
    scaling = {"rope_type": "linear", "factor": 8}
    old = read("gemma3_text", rope_theta=2e6, rope_local_base_freq=5e3, rope_scaling=scaling)
    sections = {
        "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    assert old == read("gemma3_text", rope_parameters=sections)
    assert (old.rope_theta, old.window_rope_theta, old.rope_scaling) == (2e6, 5e3, scaling)
    assert old.window_layers == (True,) * 5 + (False, True, True)
    # As Google's files for the small models have it, without the keys.
    assert read("gemma3_text").tie_embeddings and read("gemma3_text").window_rope_theta == 1e4
    assert read("gemma3_text", query_pre_attn_scalar=168).softmax_scale == 168**-0.5


def test_yarn_is_in_the_layers_of_olmo_without_a_window() -> None:
    # As published: the factor of cosines that yarn gives anyway is named too.
    a = read("olmo3", rope_theta=5e5, rope_scaling=YARN | {"attention_factor": 1.2079441541679836})
    assert a.rope_scaling is not None and a.window_rope_theta == 5e5
    assert a.window_layers == (True, True, True, False) * 2
    assert read("olmo3", rope_theta=5e5).window_rope_theta is None


def test_queries_of_llama4_and_ministral_grow() -> None:
    a = read("llama4_text", **LLAMA, no_rope_layers=[])
    assert a.query_scaling == QueryScaling(strength=0.1, tokens=8192, shift=1)
    assert a.chunk_layers == (True, True, True, False) * 2 and a.moe_layers == (True,) * 8
    assert read("llama4_text", **LLAMA, interleave_moe_layer_step=2).moe_layers == (False, True) * 4
    assert read("llama4_text", **LLAMA, attn_temperature_tuning=False).query_scaling is None
    assert read("llama4_text", **LLAMA, no_rope_layers=[], attn_scale=None) == a
    ministral = read("ministral3", rope_parameters=YARN | {"llama_4_scaling_beta": 0.1})
    assert ministral.query_scaling == QueryScaling(strength=0.1, tokens=512)


def test_a_query_sees_its_window_or_its_chunk() -> None:
    assert [read("mistral", sliding_window=16).seen_tokens(0, length) for length in (8, 100)] == [4, 16]
    a = read("llama4_text", **LLAMA, attention_chunk_size=16)
    assert [a.seen_tokens(layer, 100) for layer in (0, 3)] == [8, 50]


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is true"),
        ("exaone4", {"sliding_window": 16, "sliding_window_pattern": 0}, "sliding_window_pattern 0 needs layer_types"),
        ("mistral", {"layer_types": ["sliding_attention"] * 8}, "layer_types is set"),
        ("ministral3", {}, "rope_parameters.llama_4_scaling_beta is missing"),
        ("qwen3", {"rope_scaling": YARN | {"attention_factor": 2.0}}, "derives 1.20794 from factor"),
        ("qwen3", {"rope_scaling": YARN, "original_max_position_embeddings": 256}, "says, 512, got 256"),
        ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type must be .* got 'dynamic'"),
        ("qwen3", {"rope_scaling": {"type": "linear"}}, "rope_type linear needs factor"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation must be gelu_pytorch_tanh"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have the sections"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8}}, "rope_scaling.rope_type is missing"),
        ("olmo3", {"rope_scaling": YARN | {"truncate": False}}, "rope truncate must be true"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}, "of sliding_attention, rope_type must be default"),
        ("llama4_text", LLAMA | {"num_experts_per_tok": 2}, "num_experts_per_tok must be 1"),
        ("llama4_text", {}, "intermediate_size_mlp is missing"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must name 8 layers"),
        ("phi3", {"layer_types": ["full_attention"] * 8}, "layer_types is set"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_type must be default, got 'longrope'"),
        ("granite", {"attention_bias": True}, "attention_bias is true"),
        ("granite", {"mlp_bias": True}, "mlp_bias is true"),
        ("granite", {"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG' needs layer_types"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_name(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(model_type, **keys)
