"""Which matrices a setting means, and what is refused."""

import pytest

from rlframe.megatron.config.lora import LoraConfig, faults, trained

QKV, PROJ = "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.self_attention.linear_proj"
MLP = "decoder.layers.1.mlp"
HOMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.layers.0.self_attn.q_proj.weight": f"{QKV}.weight",
    "model.layers.0.self_attn.k_proj.weight": f"{QKV}.weight",
    "model.layers.0.self_attn.q_proj.bias": f"{QKV}.bias",
    "model.layers.0.self_attn.k_proj.bias": f"{QKV}.bias",
    "model.layers.0.self_attn.o_proj.weight": f"{PROJ}.weight",
    "model.layers.1.mlp.gate.weight": f"{MLP}.router.weight",
    "model.layers.1.mlp.experts.0.up_proj.weight": f"{MLP}.experts.local_experts.0.linear_fc1.weight",
    "model.layers.1.mlp.experts.0.down_proj.weight": f"{MLP}.experts.local_experts.0.linear_fc2.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
SHAPES = {name: (8, 6) if name.endswith(("_proj.weight", "gate.weight", "head.weight")) else (8,) for name in HOMES}
SHAPES["model.embed_tokens.weight"] = (8, 6)


def adapted(**settings: object) -> set[str]:
    """The last words of the adapted modules."""
    lora = LoraConfig(**settings)  # type: ignore[arg-type]
    return {name.split(".")[-2] for name, half, _ in trained(lora, HOMES, SHAPES) if half}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"q_proj", "k_proj", "o_proj", "up_proj", "down_proj"}),
        ({"experts": False}, {"q_proj", "k_proj", "o_proj"}),
        ({"target_modules": ["linear_qkv"]}, {"q_proj", "k_proj"}),
        ({"target_modules": ["q_proj", "linear_fc2", "lm_head"]}, {"q_proj", "down_proj", "lm_head"}),
        ({"target_modules": ["all-linear", "lm_head"], "exclude_modules": ["linear_qkv", "experts.0.up_proj"]},
         {"o_proj", "down_proj", "lm_head"}),
        # An ending starts at a dot: `proj` is none of them.
        ({"target_modules": ["proj", "o_proj"]}, {"o_proj"}),
        ({"modules_to_save": ["o_proj"]}, {"q_proj", "k_proj", "up_proj", "down_proj"}),
    ],
)  # fmt: skip
def test_names_of_either_side_choose_matrices(settings: dict[str, object], expected: set[str]) -> None:
    assert adapted(**settings) == expected


def test_what_is_trained_has_the_shapes_of_a_pair_or_its_own() -> None:
    lora = LoraConfig(rank=3, target_modules=["q_proj"], modules_to_save=["model.norm"])
    assert list(trained(lora, HOMES, SHAPES)) == [
        ("model.layers.0.self_attn.q_proj.weight", "lora_A", (3, 6)),
        ("model.layers.0.self_attn.q_proj.weight", "lora_B", (8, 3)),
        ("model.norm.weight", None, (8,)),
    ]


def test_the_product_counts_alpha_over_rank_or_over_its_root() -> None:
    assert LoraConfig(rank=16, alpha=8.0).scaling == 0.5
    assert LoraConfig(rank=16, alpha=8.0, rslora=True).scaling == 2.0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"target_modules": ["q_porj"]}, ["target_modules", "'q_porj'", "no module has this name"]),
        ({"target_modules": ["q_proj", "embed_tokens"]}, ["'embed_tokens'", "no linear matrix", "modules_to_save"]),
        ({"target_modules": ["q_proj", "mlp.gate"]}, ["'mlp.gate'", "no linear matrix"]),
        ({"exclude_modules": ["z_proj"]}, ["exclude_modules has no effect for 'z_proj'"]),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["k_proj"]},
            ["exclude_modules has no effect for 'k_proj'"],
        ),
        ({"target_modules": ["q_proj"], "experts": False}, ["experts has no effect", "got false"]),
        ({"target_modules": ["linear_fc1"], "experts": False}, ["must leave a matrix to adapt"]),
        ({"modules_to_save": ["head"]}, ["modules_to_save: 'head'", "no module has this name"]),
        ({"modules_to_save": ["q_proj"]}, ["k_proj.weight lies in", "linear_qkv.weight with", "name both"]),
        ({"target_modules": ["lm_head"]}, ["the output layer", "another t in train.parallel"]),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(settings: dict[str, object], parts: list[str]) -> None:
    dimensions = {name: len(shape) for name, shape in SHAPES.items()}
    found = list(map(str, faults(LoraConfig(**settings), HOMES, dimensions, vocabulary_fits=False)))  # type: ignore[arg-type]
    assert any(all(part in fault for part in parts) for fault in found), found


def test_the_output_layer_of_a_tied_model_is_its_embedding() -> None:
    tied = {name: home for name, home in HOMES.items() if name != "lm_head.weight"}
    dimensions = {name: len(SHAPES[name]) for name in tied}
    for settings in ({"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["output_layer"]}):
        (fault,) = map(str, faults(LoraConfig(**settings), tied, dimensions, vocabulary_fits=True))  # type: ignore[arg-type]
        assert "output layer of this model is its embedding (tie_word_embeddings)" in fault
    assert not list(faults(LoraConfig(modules_to_save=["embed_tokens"]), tied, dimensions, vocabulary_fits=True))


def test_no_effect_on_experts_and_fused_experts_are_refused() -> None:
    dense = {name: home for name, home in HOMES.items() if ".experts." not in home}
    dimensions = {name: len(SHAPES[name]) for name in HOMES}
    (fault,) = map(str, faults(LoraConfig(experts=False), dense, dimensions, vocabulary_fits=True))
    assert "train.lora.experts has no effect" in fault
    dimensions["model.layers.1.mlp.experts.0.up_proj.weight"] = 3
    (fault,) = map(str, faults(LoraConfig(), HOMES, dimensions, vocabulary_fits=True))
    assert "train.lora.experts must be false" in fault


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"alpha": 0.0}, "alpha must be above 0, got 0.0"),
        ({"dropout": 1.0}, r"dropout must be below 1, got 1.0"),
        ({"target_modules": []}, "target_modules must name at least one module"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**settings)  # type: ignore[arg-type]
