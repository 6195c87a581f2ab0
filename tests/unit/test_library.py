"""rlframe as a library."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlframe
from tests.meta.checkout import ROOT


def test_the_public_names_are_there_and_nothing_else() -> None:
    assert dir(rlframe) == sorted([*rlframe.__all__, "__version__"])
    assert all(getattr(rlframe, name) is not None for name in rlframe.__all__)
    assert callable(rlframe.run) and rlframe.run.config.RunConfig is rlframe.RunConfig
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rlframe.nonsense  # noqa: B018
    assert (ROOT / "rlframe/py.typed").is_file()


@pytest.mark.later
def test_importing_it_imports_nothing_else() -> None:
    program = "import rlframe, sys; rlframe.run; print(sorted({'torch', 'ray', 'hydra', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.thorough
def test_a_wrong_configuration_is_refused_before_the_folder_is_claimed(tmp_path: Path) -> None:
    config = rlframe.load("grpo_qwen3_moe", [f"output={tmp_path / 'run'}"])
    config.prompts_per_step = 3
    config.train.num_minibatches = 2
    with pytest.raises(rlframe.ConfigError, match="prompts_per_step"):
        rlframe.run(config)
    assert not (tmp_path / "run").exists()


def test_the_name_of_a_configuration_in_its_place_is_refused() -> None:
    with pytest.raises(rlframe.ConfigError, match="config must be a RunConfig, got 'grpo_qwen3_moe'; rlframe.load"):
        rlframe.run("grpo_qwen3_moe")  # type: ignore[arg-type]


def test_the_version_is_stated_once() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project and f'"{rlframe.__version__}"' not in project


def _set(config: Any, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = getattr(config, section)
    setattr(config, name, value)


def test_every_wrong_value_that_a_program_assigns_is_refused_as_on_the_command_line() -> None:
    config = rlframe.load("grpo_qwen3_moe")
    wrong = {"algorithm.group_size": 1, "train.optimizer.lr": -1.0, "steps": None, "reward": None, "seed": 1.5}
    for key, value in wrong.items():
        _set(config, key, value)
    with pytest.raises(rlframe.ConfigError) as refused:
        rlframe.check(config)
    assert {str(fault.key) for fault in refused.value.faults} >= wrong.keys()


def test_what_a_program_assigns_means_what_it_means_in_a_file(tmp_path: Path) -> None:
    config = rlframe.load("grpo_qwen3_moe", [f"output={tmp_path}"])
    for key, value in {"mode": "evaluate", "train.optimizer.lr": "1e-3", "evaluation": {"every_steps": 10}}.items():
        _set(config, key, value)
    found = rlframe.check(config)
    assert found.folder == tmp_path / "evaluate"
    assert found.train.optimizer.lr == 1e-3 and found.evaluation.every_steps == 10


@pytest.mark.parametrize("callback", [rlframe.Callback, print])
def test_what_is_no_callback_is_refused(callback: Any) -> None:
    with pytest.raises(rlframe.ConfigError, match="callbacks must hold instances"):
        rlframe.run(rlframe.load("grpo_qwen3_moe"), callbacks=[callback])
