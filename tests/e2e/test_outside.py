"""Every kind of component is reached from a file outside the repository, by the command line, with its own settings."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlframe.run.check import checked
from rlframe.run.load import load
from rlframe.utils.build import as_dict
from rlframe.utils.errors import ConfigError
from rlframe.utils.outside import load as load_outside
from rlframe.utils.registry import BASES

OUTSIDE = [
    "algorithm.name=mine.py:Doubled",
    "algorithm.factor=3",
    "environment.name=mine.py:Patient",
    "environment.options.greeting=hello",
    "reward.parts={short: {name: 'mine.py:Short', options: {tokens: 2}}}",
    "rollout.name=mine.py:WordyEngine",
    "rollout.word=goodbye",
    "model.family=mine.py:Family",
    "weight_sync.transport=mine.py:Mapped",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(Path(__file__).with_name("outside_components.py"), tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_kind_has_a_base_to_be_derived_from() -> None:
    assert all(isinstance(load_outside(base, key=""), type) for base in BASES.values())


def test_a_configuration_with_components_from_outside_has_no_fault(folder: Path) -> None:
    place = folder / "mine.py"
    run = load("grpo_qwen3_moe", [argument.replace("mine.py", str(place)) for argument in OUTSIDE])
    checked(as_dict(run))
    assert (run.algorithm.factor, run.rollout.word) == (3.0, "goodbye")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ("algorithm.name=mine.py:Nobody", "algorithm.name: 'mine.py:Nobody': mine.py has no 'Nobody'"),
        ("algorithm.name=nowhere.py:Doubled", "algorithm.name: 'nowhere.py:Doubled' cannot be imported: FileNotFound"),
        ("algorithm.name=no.module:X", "algorithm.name: 'no.module:X' cannot be imported: ModuleNotFoundError"),
        ("algorithm.name=mine.py:Patient", "algorithm.name must name a class derived from Algorithm, got 'mine.py:Pa"),
        ("algorithm.name=mine.py:a b", "algorithm.name must be path/to/file.py:Name or package.module:Name, got"),
        ("algorithm.facto=2", "algorithm.facto is not a key; did you mean algorithm.factor?"),
        ("rollout.name=mine.py:Patient", "rollout.name must name a class derived from RolloutEngine, got"),
        ("rollout.word=[1]", "rollout.word must be a string, got [1]"),
    ],
)
def test_a_component_that_is_not_there_or_another_is_refused_by_its_key(argument: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("grpo_qwen3_moe", [*OUTSIDE, argument])
    assert [str(each).startswith(fault) for each in caught.value.faults] == [True], str(caught.value)


def test_what_the_checks_find_of_components_from_outside_is_told_at_once() -> None:
    wrong = {
        "environment.options.greting=x": "environment.options.greting is not a key; did you mean",
        "model.family=mine.py:Short": "model.family must name a class derived from Family, got 'mine.py:Short'",
        "weight_sync.transport=mine.py:Short": "weight_sync.transport must name a class derived from Transport, got",
        "reward.parts.short.options.tokens=x": "reward.parts.short.name: a reward worker cannot start: RewardError: "
        "reward 'mine.py:Short': options.tokens must be a whole number, got 'x'",
    }
    with pytest.raises(ConfigError) as caught:
        checked(as_dict(load("grpo_qwen3_moe", [*OUTSIDE, *wrong])))
    said = list(map(str, caught.value.faults))
    assert all(any(each.startswith(fault) for each in said) for fault in wrong.values()), said


@pytest.mark.thorough
def test_the_main_job_trains_with_components_from_outside(folder: Path) -> None:
    settings = ["steps=2", "prompts_per_step=4", "algorithm.group_size=2", "rollout.num_engines=1", "train.parallel=d1"]
    quick = ["logging.tensorboard=false", "evaluation.every_steps=0", "data.evaluation_count=0", "output=run"]
    command = [sys.executable, "-m", "rlframe.main", *OUTSIDE, *settings, *quick]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "the environment says hello" in done.stderr
    assert any("the engine says goodbye" in log.read_text() for log in (folder / "run" / "logs").glob("*.log"))
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["reward/failed_fraction"] == 0.0 and "reward/short_mean" in record for record in steps)
