"""Profiles of real runs, read back: the chosen rank, the engine, the runner and the driver, and nothing else."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.program import QUICK, lines, run

RUN = QUICK | {"steps": 2, "data.evaluation_count": 0, "rollout.num_engines": 1, "checkpoint.export": "false"}


def events(file: Path) -> list[dict[str, Any]]:
    """The events of a trace that have a duration."""
    return [each for each in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if "dur" in each]


def names(file: Path) -> set[str]:
    return {each["name"] for each in events(file)}


def test_a_step_is_profiled_on_the_chosen_ranks_only(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", RUN | {"profile.steps": "[2]", "profile.ranks": "[1]"})
    profiles = folder / "profiles"
    assert [each.name for each in profiles.iterdir()] == ["step_2"]
    step = profiles / "step_2"
    assert {each.name for each in step.iterdir()} == {
        "policy_1.json.gz",
        "engines_0.json.gz",
        "runner_0.folded.txt",
        "driver.json.gz",
        "driver.folded.txt",
        "summary.json",
        "summary.md",
    }
    assert {"train", "policy.train", "weight_sync", "aten::mm"} <= names(step / "policy_1.json.gz")
    assert {"rollout", "weight_sync", "aten::mm"} <= names(step / "engines_0.json.gz")
    driver = names(step / "driver.json.gz")
    assert {"rollout", "train", "weight_sync", "account", "wait: train"} <= driver and "aten::mm" not in driver

    # The names of the phases are those of the timeline.
    (timed,) = [line for line in lines(folder / "timeline.jsonl") if line["step"] == 2]
    assert {each["name"] for each in timed["phases"]} - {"checkpoint"} <= driver

    metrics = {line["step"]: line for line in lines(folder / "metrics.jsonl") if "train/loss" in line}
    assert metrics[2]["profile/recorded"] == 1 and "profile/recorded" not in metrics[1]

    summary = json.loads((step / "summary.json").read_text())["processes"]
    assert summary.keys() == {"driver", "policy_1", "engines_0", "runner_0"}
    policy = summary["policy_1"]
    assert "aten::mm" in [row["name"] for row in policy["operators"]]
    assert policy["phases"]["train"] > 0 and 0 < policy["collectives_fraction"] < 1
    assert summary["driver"]["phases"]["wait: train"] > 0
    page = (step / "summary.md").read_text()
    assert "[policy_1.json.gz](policy_1.json.gz)" in page and "## engines_0: operators by their own time" in page
    assert not list(step.glob(".*")), "nothing is left of what engines write"


@pytest.mark.thorough
def test_an_offline_run_is_profiled_in_several_steps_with_python_functions(tmp_path: Path) -> None:
    settings = {
        "steps": 3,
        "profile.steps": "[1,3]",
        "profile.roles": "[policy]",
        "profile.stacks": "true",
        "model.random_init": "true",
        "logging.progress": "false",
    }
    folder = run(tmp_path / "run", settings, config="dpo_qwen3_moe_tiny")
    assert sorted(each.name for each in (folder / "profiles").iterdir()) == ["step_1", "step_3"]
    for step in (1, 3):
        found = events(folder / "profiles" / f"step_{step}" / "policy_0.json.gz")
        assert {"prepare", "train", "aten::mm"} <= {each["name"] for each in found}
        assert any(each["cat"] == "python_function" for each in found)
