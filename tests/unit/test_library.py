"""rlframe as a library."""

import subprocess
import sys
from pathlib import Path

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


def test_the_version_is_stated_once() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project and f'"{rlframe.__version__}"' not in project
