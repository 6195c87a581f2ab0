"""Every file of rlframe/models/families: its checkpoint is transformers' own, and its recording replays exactly."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Exaone4Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from rlframe.models.families.base import Architecture, Family
from rlframe.models.hub import FAMILIES, load_family, read_config
from rlframe.models.transformers_config import SAME_AS
from rlframe.rollout.transformers.layout import engine_layouts
from rlframe.utils import registry
from rlframe.utils.errors import ConfigError
from rlframe.weight_sync.layout.memory import clear_padding, export_tensor, load_tensor, record
from tests.tiny_models import name_anew
from tests.unit.models.parameters import empty, shapes, shards

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
ROUTED = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
INDEXED = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 8}
STACKED = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
GATED_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
CONFIGS: dict[str, list[PretrainedConfig]] = {
    "llama": [LlamaConfig(**SIZES), LlamaConfig(**SIZES, tie_word_embeddings=True)],
    "qwen2": [Qwen2Config(**SIZES), Qwen2Config(**SIZES, tie_word_embeddings=True)],
    "qwen3": [Qwen3Config(**SIZES, head_dim=8), Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)],
    "qwen3_moe": [
        Qwen3MoeConfig(**SIZES, **EXPERTS),
        Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0], tie_word_embeddings=True),
    ],
    "mixtral": [MixtralConfig(**SIZES, num_local_experts=8)],
    "glm4_moe": [
        Glm4MoeConfig(**SIZES, **ROUTED, head_dim=8, attention_bias=True, use_qk_norm=True),
        Glm4MoeConfig(**SIZES, **ROUTED, head_dim=8),
    ],
    "deepseek_v3": [
        DeepseekV3Config(**(SIZES | ROUTED | LATENT)),
        DeepseekV3Config(**(SIZES | ROUTED | LATENT | {"q_lora_rank": None})),
    ],
    "kimi_k2": [DeepseekV3Config(**(SIZES | ROUTED | LATENT))],
    "minimax_m2": [MiniMaxM2Config(**SIZES, num_local_experts=8, num_experts_per_tok=2, head_dim=8, rotary_dim=4)],
    "deepseek_v32": [DeepseekV32Config(**(SIZES | ROUTED | LATENT | INDEXED))],
    "glm_moe_dsa": [GlmMoeDsaConfig(**(SIZES | ROUTED | LATENT | INDEXED))],
    "glm4_moe_lite": [Glm4MoeLiteConfig(**(SIZES | ROUTED | LATENT))],
    "qwen3_next": [Qwen3NextConfig(**(SIZES | EXPERTS | GATED_DELTA_NET), shared_expert_intermediate_size=24)],
    "qwen3_5_text": [Qwen3_5TextConfig(**SIZES, **GATED_DELTA_NET)],
    "qwen3_5_moe_text": [
        Qwen3_5MoeTextConfig(**(SIZES | EXPERTS | GATED_DELTA_NET), shared_expert_intermediate_size=24),
    ],
    "gpt_oss": [GptOssConfig(**SIZES, **STACKED)],
    "seed_oss": [SeedOssConfig(**SIZES, head_dim=8)],
    "mistral": [MistralConfig(**SIZES, sliding_window=None)],
    "ministral3": [Ministral3Config(**SIZES, head_dim=8)],
    "olmo2": [Olmo2Config(**(SIZES | {"pad_token_id": None, "eos_token_id": None}))],
    "olmo3": [Olmo3Config(**(SIZES | {"pad_token_id": None, "eos_token_id": None}))],
    "exaone4": [
        Exaone4Config(**SIZES),
        Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 2),
    ],
    "phi3": [Phi3Config(**(SIZES | {"pad_token_id": None}))],
    "granite": [GraniteConfig(**SIZES)],
    "gemma3_text": [Gemma3TextConfig(**SIZES, head_dim=8)],
    "llama4_text": [
        Llama4TextConfig(**SIZES, num_local_experts=8, intermediate_size_mlp=40, interleave_moe_layer_step=2)
    ],
    "smollm3": [SmolLM3Config(**(SIZES | {"pad_token_id": None}))],
}
REFUSED = {
    "kimi_k25": "vision tower .* text_config as config.json",
    "qwen3_5": "vision tower.*AutoModelForCausalLM",
    "qwen3_5_moe": "vision tower",
    "gemma3": "vision tower",
    "mistral3": "vision tower",
    "llama4": "vision tower",
    "gemma4": "heads of another width",
    "gemma4_text": "heads of another width",
    "gemma4_unified": "heads of another width",
}
EXPERTS_IN = {
    "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "llama4_text", "kimi_k2", "minimax_m2",
    "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text", "deepseek_v32", "glm_moe_dsa",
}  # fmt: skip
DENSE = CONFIGS.keys() - EXPERTS_IN
WHOLE_EXPERTS = {"gpt_oss"}
"""Families whose experts no tensor parallelism cuts."""
LAYOUTS = [
    {},
    {"tp": 2, "vocab_multiple": 8},
    {"tp": 4, "vocab_multiple": 32},
    {"pp": 2},
    {"tp": 2, "pp": 2},
]
EXPERT_LAYOUTS = [{"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}, {"tp": 2, "pp": 2, "ep": 4, "etp": 2}]
CASES = [(family, index) for family, configs in CONFIGS.items() for index in range(len(configs))]
REPLAYS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS + (EXPERT_LAYOUTS if case[0] not in DENSE else [])
    if not ("etp" in layout and case[0] in WHOLE_EXPERTS)
]


@pytest.fixture(params=CASES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Family, Architecture, Path]:
    """A small model as transformers saves it, with our reading of its config."""
    name, index = request.param
    AutoModelForCausalLM.from_config(CONFIGS[name][index]).save_pretrained(tmp_path)
    if name in SAME_AS:
        name_anew(tmp_path, name)
    family = load_family(tmp_path)
    return family, family.architecture(read_config(tmp_path)), tmp_path


def test_every_family_file_has_a_config_here() -> None:
    assert sorted([*CONFIGS, *REFUSED]) == registry.names(FAMILIES)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_trained_says_why(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ConfigError, match=REFUSED[name]):
        load_family(tmp_path).architecture(read_config(tmp_path))


def test_tensors_are_those_that_transformers_writes(model: tuple[Family, Architecture, Path]) -> None:
    family, architecture, folder = model
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert family.tensors(architecture) == written


def test_architecture_reads_the_config(model: tuple[Family, Architecture, Path]) -> None:
    _, architecture, folder = model
    hf = json.loads((folder / "config.json").read_text())
    assert architecture.tie_embeddings == hf["tie_word_embeddings"]
    rope = hf["rope_parameters"]
    assert architecture.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert architecture.num_experts == (0 if hf["model_type"] in DENSE else 8)
    assert len(architecture.moe_layers) == 2


def test_the_engine_of_transformers_holds_every_tensor(model: tuple[Family, Architecture, Path]) -> None:
    family, architecture, folder = model
    (layout,) = engine_layouts(folder, dtype=torch.float32)
    assert list(layout.boxes) == list(family.tensors(architecture))


@pytest.mark.parametrize(
    ("model", "layout"),
    # These two have the parts of deepseek_v3 and deepseek_v32.
    [
        pytest.param(*replay, marks=[pytest.mark.thorough] if replay[0][0] in ("kimi_k2", "glm_moe_dsa") else [])
        for replay in REPLAYS
    ],
    indirect=["model"],
    ids=str,
)
def test_loading_and_exporting_through_the_recording_is_bit_exact(
    model: tuple[Family, Architecture, Path], layout: dict[str, int]
) -> None:
    family, architecture, folder = model
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        checkpoint = {name: file.get_tensor(name) for name in file.keys()}
    exported = {name: torch.full_like(value, torch.nan) for name, value in checkpoint.items()}
    for shard in shards(architecture, **layout):
        assert family.parameters(architecture, shard) == shapes(architecture, shard)
        direct, replayed = empty(architecture, shard), empty(architecture, shard)
        recording = record(
            lambda parameters, tensors, shard=shard: family.load(parameters, tensors, architecture, shard),
            replayed,
            family.tensors(architecture),
        )
        clear_padding(recording, replayed)
        for name, value in checkpoint.items():
            load_tensor(recording, replayed, name, value)
        family.load(direct, checkpoint, architecture, shard)
        assert all(torch.equal(direct[name], replayed[name]) for name in direct)
        for name, value in exported.items():
            export_tensor(recording, replayed, name, value)
    assert all(torch.equal(exported[name], checkpoint[name]) for name in checkpoint)
