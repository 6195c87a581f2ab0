"""From the name in the config to a folder and a family."""

import json
from pathlib import Path

import pytest

from rlframe.models.config import ModelConfig
from rlframe.models.families.qwen3 import FAMILY
from rlframe.models.hub import embedded_names, load_family, read_config, resolve
from rlframe.utils.errors import CheckpointError, ConfigError


def test_the_default_model_comes_with_rlframe_and_its_family_is_known() -> None:
    folder = resolve(ModelConfig())
    assert folder.name == ModelConfig().path and folder.name in embedded_names()
    assert load_family(folder).architecture(read_config(folder)).vocab_size > 0


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(ModelConfig(path=str(tmp_path))) == tmp_path


def test_a_missing_folder_names_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder .*nowhere, no embedded model of that name .*qwen3_moe_tiny"):
        resolve(ModelConfig(path=str(tmp_path / "nowhere")))


def test_a_hub_id_that_cannot_be_reached_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no folder .*and the hub answered"):
        resolve(ModelConfig(path="no-such-org/no-such-model"))


def test_the_family_is_the_file_named_like_the_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert load_family(tmp_path) is FAMILY


def test_an_unknown_model_type_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="must be one of .*llama, .*mixtral, .*qwen3_moe, .*got 'gpt2'"):
        load_family(tmp_path)


@pytest.mark.parametrize(
    ("language", "hint"),
    [("qwen3", "trains text models: save its language model alone"), ("other", "trains text models")],
)
def test_of_an_unknown_model_with_images_the_reason_is_told(tmp_path: Path, language: str, hint: str) -> None:
    hf = {"model_type": "seeing", "vision_config": {}, "text_config": {"model_type": language}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match=f"got 'seeing': it has a vision tower, and rlframe {hint}") as caught:
        load_family(tmp_path)
    assert (language == "qwen3") == ("Models with images" in str(caught.value))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it is an adapter: take the merged model beside it"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("{", "is not JSON"), ("{}", "must have a model_type")]
)
def test_a_broken_config_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"config.json {message}"):
        read_config(tmp_path)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path must name a model"):
        ModelConfig(path="")
