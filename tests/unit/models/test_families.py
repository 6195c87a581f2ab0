"""What config.json means, and where the pieces of fused parameters lie."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlframe.models import transformers_config
from rlframe.models.families.base import ClampedGlu, GatedDeltaNetDimensions, IndexerDimensions, MLADimensions, Shard
from rlframe.models.families.deepseek_v3 import FAMILY as DEEPSEEK_V3
from rlframe.models.families.deepseek_v32 import FAMILY as DEEPSEEK_V32
from rlframe.models.families.glm4_moe import FAMILY as GLM4_MOE
from rlframe.models.families.glm4_moe_lite import FAMILY as GLM4_MOE_LITE
from rlframe.models.families.glm_moe_dsa import FAMILY as GLM_MOE_DSA
from rlframe.models.families.gpt_oss import FAMILY as GPT_OSS
from rlframe.models.families.llama import FAMILY as LLAMA
from rlframe.models.families.minimax_m2 import FAMILY as MINIMAX_M2
from rlframe.models.families.mixtral import FAMILY as MIXTRAL
from rlframe.models.families.qwen2 import FAMILY as QWEN2
from rlframe.models.families.qwen3 import FAMILY as QWEN3
from rlframe.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from rlframe.models.families.qwen3_next import FAMILY as QWEN3_NEXT
from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor
from rlframe.models.transformers_config import SAME_AS
from rlframe.rollout.served.recording import checkpoint_tensors, random_weights
from rlframe.utils.errors import ConfigError
from tests.tiny_models import COMMON, MODELS, make
from tests.unit.models.parameters import empty

HF: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 5,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
}
MOE = HF | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
    "num_hidden_layers": 4,
}
ROUTED = HF | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 6,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
LATENT = ROUTED | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 3,
    "q_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_group": 1,
    "topk_group": 1,
}
INDEXED = LATENT | {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 4, "index_head_dim": 8}
STACKED = HF | {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "num_hidden_layers": 2,
    "head_dim": 4,
}
STATES = MOE | {
    "model_type": "qwen3_next",
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_qkv_is_stored_by_kv_group_and_cut_between_groups() -> None:
    # 4 query heads and 2 KV heads of width 1: group 0 is q0 q1 k0 v0, group 1 is q2 q3 k1 v1. Rows hold their number:
    # q 0..3, k 10..11, v 20..21.
    a = LLAMA.architecture(HF)
    checkpoint = {name: torch.zeros(shape) for name, shape in LLAMA.tensors(a).items()}
    for name, first in (("q", 0), ("k", 10), ("v", 20)):
        tensor = checkpoint[f"model.layers.0.self_attn.{name}_proj.weight"]
        tensor.copy_((torch.arange(tensor.shape[0]) + first)[:, None].expand_as(tensor))
    fused = _load_one(a, checkpoint, "self_attention.linear_qkv.weight", (8, 4), tp_rank=0, tp_size=1)
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    fused = _load_one(a, checkpoint, "self_attention.linear_qkv.weight", (4, 4), tp_rank=1, tp_size=2)
    assert fused[:, 0].tolist() == [2, 3, 11, 21]


def test_a_tensor_parallel_rank_has_its_gate_rows_over_its_up_rows() -> None:
    # Gate rows 0..3, up rows 10..13: rank 1 of 2 holds 2, 3 and 12, 13.
    a = LLAMA.architecture(HF)
    checkpoint = {name: torch.zeros(shape) for name, shape in LLAMA.tensors(a).items()}
    for name, first in (("gate", 0), ("up", 10)):
        checkpoint[f"model.layers.0.mlp.{name}_proj.weight"].copy_((torch.arange(4) + first)[:, None].expand(4, 4))
    fc1 = _load_one(a, checkpoint, "mlp.linear_fc1.weight", (4, 4), tp_rank=1, tp_size=2)
    assert fc1[:, 0].tolist() == [2, 3, 12, 13]


def test_rows_beyond_the_vocabulary_are_zeroed() -> None:
    # 5 rows padded to 8 over 2 ranks: rank 1 holds row 4 and three rows of padding.
    a = LLAMA.architecture(HF)
    checkpoint = {name: torch.ones(shape) for name, shape in LLAMA.tensors(a).items()}
    shard = Shard(tp_rank=1, tp_size=2, num_layers=0, has_output=False, padded_vocab_size=8)
    parameters = {"embedding.word_embeddings.weight": torch.full((4, 4), 7.0)}
    LLAMA.load(parameters, checkpoint, a, shard)
    assert parameters["embedding.word_embeddings.weight"][:, 0].tolist() == [1, 0, 0, 0]


def test_expert_parallel_rank_takes_its_run_of_experts() -> None:
    a = QWEN3_MOE.architecture(MOE | {"num_hidden_layers": 1})
    names = QWEN3_MOE.tensors(a)
    checkpoint = {name: torch.zeros(shape) for name, shape in names.items()}
    for expert in range(8):
        checkpoint[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"].fill_(expert)
    down = _load_one(
        a, checkpoint, "mlp.experts.local_experts.1.linear_fc2.weight", (4, 16), ep_rank=2, ep_size=4, family=QWEN3_MOE
    )
    # Rank 2 of 4 holds experts 4 and 5.
    assert down.unique().tolist() == [5]


@pytest.mark.parametrize(
    "rope",
    [{"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3},
     {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3}],
    ids=["transformers 5", "transformers 4"],
)  # fmt: skip
def test_llama3_rope_is_read_from_both_forms(rope: dict[str, Any]) -> None:
    a = LLAMA.architecture(HF | rope)
    assert a.rope_theta == 5e5
    assert a.rope_scaling == {"rope_type": "llama3"} | LLAMA3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["sliding_attention"]}, "sliding window"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"is_causal": False}, "is_causal is false: the model is an encoder"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type must be default or .* yarn, got .dynamic.",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn needs original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"factor": None}}, "llama3 needs factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling must say what rope_parameters says, .*: put its values into rope_parameters",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method must be one of fp8"),
    ],
)
def test_what_would_be_silently_wrong_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLAMA.architecture(HF | extra)


def test_families_differ_where_they_should() -> None:
    assert QWEN2.architecture(HF | {"model_type": "qwen2"}).qkv_bias
    qwen3 = QWEN3.architecture(HF | {"model_type": "qwen3"})
    assert qwen3.qk_norm and qwen3.head_dim == 128  # transformers' own default, not 4 / 4


def test_two_sections_about_rope_may_agree() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    a = LLAMA.architecture(
        HF | {"rope_parameters": linear | {"rope_theta": 5e5}, "rope_theta": 5e5, "rope_scaling": linear}
    )
    assert (a.rope_theta, a.rope_scaling) == (5e5, linear)


DECIDED_BY_DEFAULTS = ("num_kv_heads", "latent", "rope_theta", "rope_scaling", "rotary_percent", "router_scale",
                       "router_groups", "router_groups_per_token", "moe_layers", "window_layers",
                       "window_rope_theta")  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_config_json_does_not_say_is_what_transformers_takes(name: str) -> None:
    cls, own = MODELS[name]
    whole = getattr(transformers, cls)(**(COMMON | own)).to_dict() | ({"model_type": name} if name in SAME_AS else {})
    family = importlib.import_module(f"rlframe.models.families.{whole['model_type']}").FAMILY
    known = transformers.CONFIG_MAPPING[SAME_AS.get(name, whole["model_type"])]
    for key in ("rope_parameters", "routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace",
                "mlp_layer_types", "layer_types", "sliding_window", "num_key_value_heads", "q_lora_rank"):  # fmt: skip
        less = {each: value for each, value in whole.items() if each != key}
        theirs = known.from_dict(copy.deepcopy(less)).to_dict() | {"model_type": whole["model_type"]}
        found = [_read(family, hf) for hf in (less, theirs)]
        # What is refused cannot be wrong.
        assert found[0] in (found[1], None), key


def test_transformers_loads_the_experts_of_a_type_that_it_does_not_have(tmp_path: Path) -> None:
    # Its map from files to stacked experts goes by the model_type; without it they were drawn at random.
    made = make("kimi_k2", tmp_path).state_dict()
    read = transformers_config.read(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=read, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in made.items())


def _read(family: Any, hf: dict[str, Any]) -> dict[str, Any] | None:
    try:
        read = family.architecture(hf)
    except ConfigError:
        return None
    return {field: getattr(read, field) for field in DECIDED_BY_DEFAULTS}


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_next"])
def test_random_norms_are_those_of_transformers_own_random_weights(name: str, tmp_path: Path) -> None:
    cls, own = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, cls)(**(COMMON | own)))
    model.config.save_pretrained(tmp_path)
    theirs = model.state_dict()
    found = dict(random_weights(checkpoint_tensors(tmp_path), tmp_path, seed=0, device="cpu"))
    norms = [each for each in found if each.endswith("norm.weight")]
    assert len(norms) >= 7 and all(torch.equal(found[each], theirs[each]) for each in norms)
    head = [each for each in checkpoint_tensors(tmp_path, with_mtp=True) if each.startswith("mtp.pre_fc_norm")]
    drawn = [random_tensor(each, (4,), zero_centered_norms=True, seed=0) for each in head]
    assert len(head) in (0, 2) and not any(each.any() for each in drawn)


def test_experts_of_deepseek_and_glm_are_read() -> None:
    a = GLM4_MOE.architecture(ROUTED | {"partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True})
    assert (a.rotary_percent, a.qkv_bias, a.qk_norm) == (0.5, True, True)
    assert (a.sigmoid_router, a.router_scale, a.router_groups) == (True, 2.5, 1)
    assert a.shared_ffn_hidden_size == 12  # two shared experts of width 6
    assert a.moe_layers == (False, True, True)
    assert GLM4_MOE.architecture(ROUTED | {"routed_scaling_factor": None}).router_scale == 1.0


def test_gated_delta_nets_are_read() -> None:
    a = QWEN3_NEXT.architecture(STATES)
    assert a.gated_delta_layers == (True, False, True, False)
    assert a.gated_delta_net == GatedDeltaNetDimensions(
        num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, conv_kernel=3
    )
    # Of a key head: a query and a key of 6, two values of 5, as many gates, and two numbers for each value.
    assert (a.gated_delta_net.conv_channels, a.gated_delta_net.projected) == (22, 36)
    assert (a.rotary_percent, a.head_dim) == (0.25, 256)  # transformers' own defaults
    assert a.output_gate and a.qk_norm and a.zero_centered_norms and a.shared_expert_gate
    assert [str(fault) for fault in a.faults(tp=2, ep=1, etp=1, cp=2)][:1] == [
        "train.parallel: tp * cp 4 must divide linear_num_key_heads 2 of qwen3_next"
    ]
    every_fourth = QWEN3_NEXT.architecture({**STATES, "layer_types": None})
    assert every_fourth.gated_delta_layers == (True, True, True, False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads 3 must divide linear_num_value_heads 4"),
        ({"layer_types": ["linear_attention"]}, "layer_types must name 4 layers"),
        ({"layer_types": ["chunked"] * 4}, "layer_types must be full_attention or linear_attention"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type must be silu"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
    ],
)
def test_what_a_gated_delta_net_cannot_be_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QWEN3_NEXT.architecture(STATES | extra)


@pytest.mark.thorough
def test_the_language_model_of_qwen3_5_is_saved_as_its_refusal_says(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    text |= {"intermediate_size": 8, "vocab_size": 11, "layer_types": ["linear_attention", "full_attention"]}
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=seen)
    whole, language = tmp_path / "whole", tmp_path / "language"
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(whole)
    with pytest.raises(ConfigError, match="model._weight_conversions = None; model.save_pretrained"):
        load_family(whole).architecture(read_config(whole))
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
    model._weight_conversions = None
    model.save_pretrained(language)
    saved, before = load_file(language / "model.safetensors"), load_file(whole / "model.safetensors")
    tensors = load_family(language).tensors(load_family(language).architecture(read_config(language)))
    assert tensors == {name: tuple(value.shape) for name, value in saved.items()}
    assert all(torch.equal(saved[name], before[name.replace("model.", "model.language_model.", 1)]) for name in saved)


def test_latent_attention_is_read() -> None:
    a = DEEPSEEK_V3.architecture(LATENT | {"n_group": 4, "topk_group": 2, "num_key_value_heads": 1})
    assert a.latent == MLADimensions(
        query_rank=5, kv_rank=3, plain_head_dim=4, rotary_head_dim=2, value_head_dim=3, norm_eps=1e-6
    )
    # A head is 4 + 2 wide, and every one of the 4 has its own key.
    assert (a.head_dim, a.num_kv_heads) == (6, 4)
    assert (a.router_groups, a.router_groups_per_token) == (4, 2)


def test_yarn_has_the_defaults_of_transformers() -> None:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    assert GPT_OSS.architecture(STACKED | {"rope_scaling": rope}).rope_scaling == rope | {
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": None, "mscale_all_dim": None,
    }  # fmt: skip
    # transformers reads mscale only beside mscale_all_dim.
    lone = DEEPSEEK_V3.architecture(LATENT | {"rope_scaling": rope | {"truncate": True, "mscale": 0.7}}).rope_scaling
    assert lone and (lone["mscale"], lone["mscale_all_dim"]) == (None, None)


def test_indexers_are_read_and_not_split() -> None:
    a = DEEPSEEK_V32.architecture(INDEXED | {"num_hidden_layers": 5, "first_k_dense_replace": None})
    assert a.indexer == IndexerDimensions(num_heads=4, head_dim=8, top_k=2048, interleaved=False)
    # transformers has three dense layers if config.json does not say.
    assert a.moe_layers == (False, False, False, True, True)
    for name in ("indexed_attention", "deepseek_sparse_attention"):
        assert DEEPSEEK_V32.architecture(INDEXED | {"layer_types": [name] * 3}).indexer == a.indexer
    shard = Shard(num_layers=1, padded_vocab_size=6, tp_size=2)
    assert DEEPSEEK_V32.parameters(a, shard)["decoder.layers.0.self_attention.indexer.wq_b"] == (32, 5)
    assert list(map(str, a.faults(tp=1, ep=1, etp=1, cp=2))) == [
        "train.parallel: cp 2 cannot split the sequences of deepseek_v32, whose attention is sparse: use tp"
    ]


def test_minimax_is_read_as_published() -> None:
    a = MINIMAX_M2.architecture(STACKED | {"rotary_dim": 2, "scoring_func": "sigmoid"})
    assert a.rotary_percent == 0.5 and a.sigmoid_router and a.moe_layers == (True, True)
    # Query heads 4 * 4 wide, of which a rank of two has half.
    shard = Shard(num_layers=2, padded_vocab_size=6, tp_size=2)
    assert MINIMAX_M2.tensors(a)["model.layers.0.self_attn.q_norm.weight"] == (16,)
    assert MINIMAX_M2.parameters(a, shard)["decoder.layers.0.self_attention.k_layernorm.weight"] == (4,)


def test_gpt_oss_is_read() -> None:
    a = GPT_OSS.architecture(STACKED | {"num_hidden_layers": 3})
    assert a.window_layers == (True, False, True) and a.sliding_window == 8
    assert a.clamped_glu == ClampedGlu(alpha=1.702, limit=7.0)
    assert a.sinks and a.linear_bias and a.qkv_bias and a.rope_theta == 150000.0
    assert GPT_OSS.architecture(STACKED | {"swiglu_alpha": None, "swiglu_limit": None}).clamped_glu == a.clamped_glu


def test_an_expert_of_gpt_oss_is_its_slice_transposed() -> None:
    # Layer 0, expert 2, fc1: entry [row r, column c] is entry [c, r] of the slice, rows gate and up by turns.
    a = GPT_OSS.architecture(STACKED)
    checkpoint = {name: torch.zeros(shape) for name, shape in GPT_OSS.tensors(a).items()}
    stacked = checkpoint["model.layers.0.mlp.experts.gate_up_proj"]
    stacked.copy_(torch.arange(stacked.numel()).view_as(stacked))
    parameters = empty(a, Shard(num_layers=2, padded_vocab_size=8, ep_rank=1, ep_size=2))
    GPT_OSS.load(parameters, checkpoint, a, Shard(num_layers=2, padded_vocab_size=8, ep_rank=1, ep_size=2))
    fc1 = parameters["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"]
    # 4 x 8 a slice: expert 2 starts at 64, and its element [c, r] is 64 + 8 c + r.
    assert fc1[5].tolist() == [69, 77, 85, 93]


@pytest.mark.parametrize(
    ("family", "hf", "extra", "message"),
    [
        (MIXTRAL, MOE, {"num_local_experts": 4, "sliding_window": 4096}, "sliding_window must be null, got 4096"),
        (MIXTRAL, STACKED, {"num_experts_per_tok": 1, "sliding_window": None}, "must be at least 2: .* softmax"),
        (GLM4_MOE, ROUTED, {"norm_topk_prob": False}, "norm_topk_prob must be true"),
        (GLM4_MOE, ROUTED, {"num_experts_per_tok": 1}, "norm_topk_prob must be false with one expert per token"),
        (GLM4_MOE, ROUTED, {"n_group": 3, "topk_group": 2}, "n_group 3 must divide n_routed_experts 8"),
        (DEEPSEEK_V3, LATENT, {"n_group": 4, "topk_group": 1}, "num_experts_per_tok 4 // topk_group 1 must be 2"),
        (DEEPSEEK_V3, LATENT, {"scoring_func": "softmax"}, "scoring_func must be sigmoid, .* got 'softmax'"),
        (GLM4_MOE_LITE, LATENT, {"first_k_dense_replace": 2}, "first_k_dense_replace must be 1, .* got 2"),
        (GLM4_MOE_LITE, LATENT, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name dense or sparse for each"),
        (DEEPSEEK_V3, LATENT, {"rope_interleave": False}, "rope_interleave must be true"),
        (DEEPSEEK_V3, LATENT, {"kv_lora_rank": None, "attention_bias": True}, "attention_bias is true"),
        (DEEPSEEK_V3, LATENT, {"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn needs original_max_position"),
        (DEEPSEEK_V3, LATENT, {"rope_scaling": {"truncate": False}}, "rope truncate must be true"),
        (DEEPSEEK_V32, INDEXED, {"index_topk": None, "q_lora_rank": None}, "index_topk is missing[\\s\\S]*q_lora_rank"),
        (DEEPSEEK_V32, INDEXED, {"layer_types": ["full_attention"] * 3}, "layer_types must be deepseek_sparse"),
        (DEEPSEEK_V32, INDEXED, {"index_head_dim": 1 + 1, "qk_rope_head_dim": 4}, "index_head_dim 2 must be at least"),
        (GLM_MOE_DSA, INDEXED, {"indexer_types": ["full", "shared", "full"]}, "indexer_types must be full for every"),
        (GLM_MOE_DSA, INDEXED, {"index_topk_freq": 4}, "indexer_types must be full for every"),
        (GLM_MOE_DSA, INDEXED, {"indexer_rope_interleave": False}, "indexer_rope_interleave must be True"),
        (MINIMAX_M2, STACKED, {"attn_type_list": [1, 0]}, "attn_type_list must be 1 for every layer"),
        (MINIMAX_M2, STACKED, {"qk_norm_type": "per_head"}, "qk_norm_type must be per_layer, .* got 'per_head'"),
        (MINIMAX_M2, STACKED, {"num_experts_per_tok": 1}, "num_experts_per_tok must be at least 2"),
        (GPT_OSS, STACKED, {"attention_bias": False}, "attention_bias must be true"),
        (GPT_OSS, STACKED, {"sliding_window": None}, "sliding_window is missing"),
        (GPT_OSS, STACKED, {"quantization_config": {"quant_method": "awq"}}, "quant_method must be one of"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(
    family: Any, hf: dict[str, Any], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        family.architecture(hf | extra)


def test_dense_and_sparse_layers_follow_the_config() -> None:
    # Every second layer is sparse (1 and 3), and layer 3 is named dense.
    a = QWEN3_MOE.architecture(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert a.moe_layers == (False, True, False, False)


def test_transformers_5_name_of_the_expert_count_is_read() -> None:
    hf = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 4}
    assert QWEN3_MOE.architecture(hf).num_experts == 4


def test_faults_name_every_division_that_fails() -> None:
    a = QWEN3_MOE.architecture(MOE)
    assert a.faults(tp=2, ep=8, etp=16) == []
    assert list(map(str, a.faults(tp=4, ep=3, etp=3))) == [
        "train.parallel: tp 4 must divide num_kv_heads 2 of qwen3_moe",
        "train.parallel: ep 3 must divide num_experts 8 of qwen3_moe",
        "train.parallel: etp 3 must divide expert_ffn_hidden_size 16 of qwen3_moe",
    ]
    assert list(map(str, LLAMA.architecture(HF).faults(tp=1, ep=2, etp=1))) == [
        "train.parallel: ep 2 needs experts, and llama is dense: leave ep at 1"
    ]


def test_faults_name_what_cannot_be_split() -> None:
    assert list(map(str, GPT_OSS.architecture(STACKED).faults(tp=2, ep=2, etp=2, cp=2))) == [
        "train.parallel: etp 2 cannot split the experts of gpt_oss, which have biases: Megatron-Core 0.16.1 would add "
        "the bias on every rank; use ep",
        "train.context_parallel.communication=a2a needs tp 2 * cp 2 to divide num_kv_heads 2 of gpt_oss; use a smaller "
        "cp",
    ]
    assert not GPT_OSS.architecture(STACKED).faults(tp=1, ep=1, etp=1, cp=2, communication="a2a")
    (fault,) = GPT_OSS.architecture(STACKED).faults(tp=1, ep=1, etp=1, cp=2, communication="p2p")
    assert str(fault) == (
        "train.context_parallel.communication must be a2a with cp 2 for gpt_oss, got p2p: its attention has sliding "
        "windows or sinks, for which a rank needs whole sequences of its heads; or use tp"
    )
    assert not LLAMA.architecture(HF).faults(tp=1, ep=1, etp=1, cp=4, communication="p2p")
    (fault,) = LLAMA.architecture(HF).faults(tp=1, ep=1, etp=1, cp=4, communication="a2a")
    assert str(fault) == (
        "train.context_parallel.communication=a2a needs tp 1 * cp 4 to divide num_kv_heads 2 of llama; use p2p"
    )
    assert not LLAMA.architecture(HF).faults(tp=1, ep=1, etp=1, cp=2, dynamic=True)
    (fault,) = DEEPSEEK_V3.architecture(LATENT).faults(tp=1, ep=1, etp=1, cp=2, dynamic=True)
    assert str(fault) == (
        "train.context_parallel.dynamic must be false for deepseek_v3, got true: Megatron-Core's latent attention "
        "takes no group of its own for a micro-batch; remove it"
    )
    # Shared experts of width 2 * 5 over four ranks.
    glm = GLM4_MOE.architecture(ROUTED | {"moe_intermediate_size": 5, "num_key_value_heads": 4})
    (fault,) = glm.faults(tp=4, ep=1, etp=1)
    assert str(fault) == "train.parallel: tp 4 must divide shared_ffn_hidden_size 10 of glm4_moe"


def _load_one(
    a: Any, checkpoint: dict[str, Any], name: str, shape: tuple[int, ...], *, family: Any = LLAMA, **rank: int
) -> torch.Tensor:
    """The parameter `name` of layer 0 after loading; the others are given room without a look."""
    parameters = empty(a, Shard(num_layers=1, padded_vocab_size=8, **rank))
    family.load(parameters, checkpoint, a, Shard(num_layers=1, padded_vocab_size=8, **rank))
    found = parameters[f"decoder.layers.0.{name}"]
    assert tuple(found.shape) == shape
    return found
