"""Adapters in PEFT's format: names, config, new values, and what does not fit."""

import json
import math
import pathlib

import pytest
import torch
from safetensors.torch import load_file

from rlframe.models import adapters
from rlframe.models.checkpoint import save
from rlframe.utils.errors import CheckpointError

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
PREFIX = "base_model.model."
TENSORS = {
    f"{PREFIX}{Q}.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0]]),
    f"{PREFIX}{Q}.lora_B.weight": torch.tensor([[1.0], [-2.0]]),
    f"{PREFIX}model.norm.weight": torch.ones(3),
}
SHAPES = {name: tuple(value.shape) for name, value in TENSORS.items()}
SETTINGS = {"rank": 1, "alpha": 3.0, "rslora": False}


def write(folder: pathlib.Path, *others: str) -> pathlib.Path:
    adapters.write(
        folder, TENSORS.items(), base="some/model", model_tensors=[f"{Q}.weight", "model.norm.weight", *others],
        dropout=0.1, **SETTINGS,
    )  # fmt: skip
    return folder


def test_the_files_are_as_peft_documents_them(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    held = load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(held) == [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.norm.weight",
    ]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["use_rslora"]) == (1, 3.0, 0.1, False)
    assert config["target_modules"] == ["q_proj"] and config["modules_to_save"] == ["model.norm"]
    assert config["base_model_name_or_path"] == "some/model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_modules_are_named_in_full_where_their_last_word_would_mean_more(tmp_path: pathlib.Path) -> None:
    write(tmp_path, f"{K}.weight")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [Q]


def test_names_lead_to_the_pair_of_a_matrix_and_to_a_whole_tensor() -> None:
    assert adapters.key(f"{Q}.weight", "lora_A") == f"{PREFIX}{Q}.lora_A.weight"
    assert adapters.key("lm_head.weight") == f"{PREFIX}lm_head.weight"


def test_a_new_pair_changes_nothing_and_its_a_is_uniform_below_one_over_the_root_of_its_width() -> None:
    name = f"{PREFIX}{Q}.lora_A.weight"
    a = adapters.initial(name, (16, 400), seed=1)
    # Kaiming-uniform with a = sqrt(5), worked by hand: sqrt(1 / 3) * sqrt(3 / 400) = 1 / 20.
    assert 0.0495 < float(a.abs().max()) <= 0.05
    assert float(a.std()) == pytest.approx(0.05 / math.sqrt(3), rel=0.05)
    like_torch = torch.nn.init.kaiming_uniform_(torch.empty(16, 400), a=math.sqrt(5))
    assert float(a.std()) == pytest.approx(float(like_torch.std()), rel=0.05)
    assert torch.equal(a, adapters.initial(name, (16, 400), seed=1))
    assert not torch.equal(a, adapters.initial(name, (16, 400), seed=2))
    assert not torch.equal(a, adapters.initial(name.replace("q_proj", "k_proj"), (16, 400), seed=1))
    assert not adapters.initial(f"{PREFIX}{Q}.lora_B.weight", (400, 16), seed=1).any()


def test_an_adapter_of_the_settings_has_no_fault_and_is_read_back(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    assert adapters.faults(tmp_path, SHAPES, **SETTINGS) == []
    for name, value in TENSORS.items():
        assert torch.equal(adapters.read(tmp_path, name), value)


def test_an_adapter_of_other_settings_says_what_differs(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    fewer = {name: shape for name, shape in SHAPES.items() if "lora_B" not in name}
    expected = fewer | {f"{PREFIX}{Q}.lora_A.weight": (2, 3), f"{PREFIX}{K}.lora_A.weight": (2, 3)}
    assert adapters.faults(tmp_path, expected, rank=2, alpha=3.0, rslora=True) == [
        "has r = 1, train.lora says 2",
        "has use_rslora = False, train.lora says True",
        f"lacks 1 tensors by the settings' target_modules, such as {PREFIX}{K}.lora_A.weight",
        f"also has 1 tensors by the settings' target_modules, such as {PREFIX}{Q}.lora_B.weight",
        f"has {PREFIX}{Q}.lora_A.weight of shape [1, 3], the model expects [2, 3]",
    ]


def test_an_adapter_that_is_more_than_a_product_beside_the_weights_says_so(tmp_path: pathlib.Path) -> None:
    file = write(tmp_path) / "adapter_config.json"
    own = json.loads(file.read_text())
    for start in ("gaussian", True, None):
        file.write_text(json.dumps(own | {"init_lora_weights": start}))
        assert adapters.faults(tmp_path, SHAPES, **SETTINGS) == []
    file.write_text(json.dumps(own | {"init_lora_weights": "pissa_niter_4", "alora_invocation_tokens": [1, 2]}))
    assert adapters.faults(tmp_path, SHAPES, **SETTINGS) == [
        "has init_lora_weights = 'pissa_niter_4', which changes the base too: have PEFT convert it",
        "has alora_invocation_tokens, which is not supported",
    ]


def test_an_embedding_that_a_tied_model_trains_in_full_is_the_output_layer_too(tmp_path: pathlib.Path) -> None:
    embedding, output = (f"{PREFIX}{name}.weight" for name in ("model.embed_tokens", "lm_head"))
    tensors, tied = TENSORS | {embedding: torch.ones(2, 3)}, SETTINGS | {"tied": True}
    adapters.write(tmp_path, tensors.items(), base="some/model", model_tensors=[], dropout=0.0, **tied)
    held = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(held[output], held[embedding])
    saved = json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"]
    assert saved == ["lm_head", "model.embed_tokens", "model.norm"]
    expected = SHAPES | {embedding: (2, 3)}
    assert adapters.faults(tmp_path, expected, **tied) == []
    assert len(adapters.faults(tmp_path, expected, **SETTINGS)) == 1
    # One of PEFT's, which has trained the two apart.
    save(held | {output: torch.zeros(2, 3)}, tmp_path / "adapter_model.safetensors")
    assert output in adapters.faults(tmp_path, expected, **tied)[0]


def test_an_adapter_of_a_model_without_a_head_has_the_names_of_its_class(tmp_path: pathlib.Path) -> None:
    given = {"base": "some/model", "model_tensors": [f"{Q}.weight", f"{K}.weight"], "dropout": 0.0, "headless": True}
    adapters.write(tmp_path, TENSORS.items(), **given, **SETTINGS)
    # Those that PEFT 0.21 finds in transformers' AutoModel.
    assert sorted(load_file(tmp_path / "adapter_model.safetensors")) == [
        "base_model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.layers.0.self_attn.q_proj.lora_B.weight",
        "base_model.model.norm.weight",
    ]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"
    assert config["target_modules"] == ["layers.0.self_attn.q_proj"] and config["modules_to_save"] == ["norm"]
    assert adapters.faults(tmp_path, SHAPES, **SETTINGS) == []
    for name, value in TENSORS.items():
        assert torch.equal(adapters.read(tmp_path, name), value)


def test_a_module_whose_name_ends_others_without_a_head_keeps_the_class_with_one(tmp_path: pathlib.Path) -> None:
    names = [f"{Q}.weight", "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"]
    given = {"base": "some/model", "model_tensors": names, "dropout": 0.0, "headless": True}
    adapters.write(tmp_path, TENSORS.items(), **given, **SETTINGS)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    # PEFT 0.21 takes q_norm for the module norm, and finds no such tensor in the file.
    assert config["task_type"] == "CAUSAL_LM" and config["modules_to_save"] == ["model.norm"]


def test_folders_that_are_no_adapters_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="not an adapter in PEFT format"):
        adapters.faults(tmp_path, SHAPES, **SETTINGS)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(CheckpointError, match="peft_type must be LORA"):
        adapters.faults(tmp_path, SHAPES, **SETTINGS)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read"):
        adapters.faults(tmp_path, SHAPES, **SETTINGS)
    write(tmp_path)
    with pytest.raises(CheckpointError, match="nothing cannot be read"):
        adapters.read(tmp_path, "nothing")
