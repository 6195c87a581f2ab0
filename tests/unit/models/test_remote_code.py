"""Code of a model's folder runs only where the user said so, from files that cannot change."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

from rlframe.models import remote_code, tokenizer
from rlframe.models.checkpoint import copy_sidecars
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.run.check.model import file_faults, files
from rlframe.run.compose.parts import carry_code
from rlframe.run.load import load
from rlframe.utils.errors import CheckpointError, ConfigError
from tests.rollout_models import make_with_tokenizer

CODE = """
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


class Loud(PreTrainedTokenizerFast):
    vocab_files_names = {"words_file": "words.json"}

    def __init__(self, words_file, **more):
        super().__init__(tokenizer_object=Tokenizer.from_file(words_file), **more)

    def shout(self):
        return "ran"
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer is code in its folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(remote_code, "_trusted", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = make_with_tokenizer("qwen3", tmp_path / "model")
    (made / "tokenization_loud.py").write_text(CODE)
    # As with Kimi, no other file says what the tokens are.
    (made / "tokenizer.json").rename(made / "words.json")
    named(made, "tokenization_loud.Loud")
    return made


def named(folder: Path, name: str) -> None:
    """Names code as the tokenizer of a folder."""
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"tokenizer_class": "Loud", "auto_map": {"AutoTokenizer": [None, name]}}
    path.write_text(json.dumps(values))


def test_the_default_refuses_with_the_key(folder: Path) -> None:
    resolve(ModelConfig(path=str(folder)))
    with pytest.raises(
        CheckpointError, match=r"own, tokenization_loud.Loud, .* read it, and set model.trust_remote_code=true"
    ):
        tokenizer.load(folder)


def test_it_runs_where_the_user_said_so_and_the_log_says_which(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve(ModelConfig(path=str(folder), trust_remote_code=True))
    words = tokenizer.load(folder)
    assert words.shout() == "ran"  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        carry_code(folder)
    assert "model.trust_remote_code=true" in caplog.text and "tokenization_loud.py (sha256 " in caplog.text
    # An export is a model only with the code.
    copy_sidecars(folder, folder.parent / "export", dtype=torch.float32)
    assert (folder.parent / "export" / "tokenization_loud.py").read_text() == CODE


@pytest.mark.thorough  # the other process imports transformers
def test_the_tokenizer_reaches_a_process_that_has_not_loaded_it(folder: Path) -> None:
    resolve(ModelConfig(path=str(folder), trust_remote_code=True))
    words = tokenizer.load(folder)
    carry_code(folder)
    (folder / "words").write_bytes(cloudpickle.dumps(words))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).shout())"
    told = subprocess.run(
        [sys.executable, "-c", program, str(folder / "words")],
        env=os.environ | {"HF_HOME": str(folder / "nowhere")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == "ran"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", COMMIT[:12]])
def test_a_hub_model_needs_a_commit(revision: str | None) -> None:
    with pytest.raises(ConfigError, match=r"model.revision must be a commit of 40 digits .*, got"):
        resolve(ModelConfig(path="no-such-org/no-such-model", revision=revision, trust_remote_code=True))


def test_code_of_another_repository_is_refused(folder: Path) -> None:
    named(folder, "someone/else--tokenization_loud.Loud")
    with pytest.raises(CheckpointError, match="code of another repository, someone/else--tokenization_loud"):
        resolve(ModelConfig(path=str(folder), trust_remote_code=True))


def test_a_folder_without_code_leaves_the_setting_without_effect(tmp_path: Path) -> None:
    made = make_with_tokenizer("qwen3", tmp_path / "model")
    run = load("grpo_qwen3_moe", [f"model.path={made}", "model.trust_remote_code=true"])
    (fault,) = files(run)
    assert str(fault).startswith("model.trust_remote_code has no effect, got true")


def test_the_fault_of_a_run_names_the_key_and_the_class(folder: Path) -> None:
    architecture = load_family(folder).architecture(read_config(folder))
    model = ModelConfig(path=str(folder))
    (fault,) = file_faults(model, architecture, num_outputs=None, key="model.path")
    assert "set model.trust_remote_code=true" in str(fault)
