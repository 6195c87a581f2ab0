"""Weights that are not what config.json calls for are named, with the file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlframe.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from rlframe.models.inspection import faults, model_faults
from tests.unit.models.parameters import SMALL_MOE

SHAPES = {"a": (4, 3), "b": (3,), "norm": (5000, 1000)}


def whole(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in SHAPES.items()} | changes


def found(folder: Path, tensors: dict[str, torch.Tensor], *, optional: frozenset[str] = frozenset()) -> list[str]:
    save_file(tensors, folder / "model.safetensors")
    return faults(folder, SHAPES, optional=optional, ignored=frozenset({"extra."}))


def test_what_fits_has_no_fault(tmp_path: Path) -> None:
    more = {
        "x.rotary_emb.inv_freq": torch.ones(2),
        "extra.7": torch.ones(1),
        "extra.eh_proj.weight": torch.ones(1),
        "b": torch.ones(3).bfloat16(),
    }
    assert found(tmp_path, whole(**more)) == []
    assert found(tmp_path, {name: one for name, one in whole().items() if name != "b"}, optional=frozenset("b")) == []


def spoiled(value: float, *place: int) -> torch.Tensor:
    tensor = torch.ones(SHAPES["norm"])
    tensor[place] = value
    return tensor


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"a": torch.ones(3, 4)}, r"1 tensors are of another shape: a has shape [3, 4], config.json calls for [4, 3]"),
        ({"a": torch.ones(4, 3, dtype=torch.int8)}, "number format: a must be of F32, F16, BF16, got I8"),
        ({"a": torch.ones(4, 3, dtype=torch.bool)}, "number format: a must be of F32, F16, BF16, got BOOL"),
        ({"b": torch.tensor([1.0, 1.0, float("nan")])}, "1 tensors hold NaN or infinity: b"),
        # 20 MB of 5,000,000 values: read whole while fewer than 12 tensors share the 256 MB.
        ({"norm": spoiled(float("-inf"), 2500, 17)}, "1 tensors hold NaN or infinity: norm"),
        ({"extra.7": torch.ones(1)}, "1 tensors that its config.json does not call for: extra.7"),
    ],
    ids=["shape", "int8", "bool", "NaN", "infinity", "extra"],
)
def test_what_does_not_is_named(tmp_path: Path, changes: dict[str, torch.Tensor], sentence: str) -> None:
    (fault,) = found(tmp_path, whole(**changes))
    assert sentence in fault and str(tmp_path) in fault


def test_of_a_large_tensor_beginning_middle_and_end_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.models.inspection.SAMPLED_BYTES", 36_000)
    # 12,000 bytes for each of three tensors are 3,000 values, so one row of 1,000 each from 0, 2500 and 4999.
    for row in (0, 2499, 4999):
        assert len(found(tmp_path, whole(norm=spoiled(float("nan"), row, 5)))) == 1
    assert found(tmp_path, whole(norm=spoiled(float("nan"), 100, 5))) == []


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, "such as 'norm', for which it says 'nothing'"),
        ({"a": "gone.safetensors"}, "names files that do not exist"),
        ({"a": "../one.safetensors"}, "must be in a .safetensors file of the folder, got '../one.safetensors'"),
        ({"a": 5}, "must be in a .safetensors file of the folder, got 5"),
        ([], "its weight_map names no tensor"),
    ],
)
def test_an_index_must_be_of_the_files(tmp_path: Path, weight_map: object, sentence: str) -> None:
    save_file(whole(), tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (fault,) = faults(tmp_path, SHAPES, optional=frozenset(), ignored=frozenset())
    assert sentence in fault


def test_a_second_output_layer_of_a_tied_model_must_be_its_embedding(tmp_path: Path) -> None:
    config = SMALL_MOE | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.ones(shape) for name, shape in QWEN3_MOE.tensors(QWEN3_MOE.architecture(config)).items()}
    embedding = tensors["model.embed_tokens.weight"]
    for head, sound in ((embedding.clone(), True), (embedding + 1e-3, False), (embedding[:-1].clone(), False)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        found = model_faults(tmp_path, num_outputs=None)
        assert found == [] if sound else "lm_head.weight is not model.embed_tokens.weight" in found[0]
        assert model_faults(tmp_path, num_outputs=1) == []
