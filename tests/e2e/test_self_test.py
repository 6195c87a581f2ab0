"""mode=self_test as a whole program: right runs pass without a warning, planted faults are found by their check."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.planted import FAULTS
from tests.campaigns.self_tests import CLEAN, SETTINGS, found_by, self_test
from tests.e2e.recipes import draw_weights, make_model
from tests.multiprocess.program import REWARD, run

ONE_RANK: dict[str, Any] = {"train.parallel": "d1"}
SMALL = SETTINGS | ONE_RANK | {"prompts_per_step": 8, "self_test.steps": 3}
BFLOAT16: dict[str, Any] = {"train.dtype": "bfloat16"}
OTHERS: dict[str, dict[str, Any]] = {
    "bfloat16": BFLOAT16,
    "lora": ONE_RANK | {"train.lora.rank": 4},
    "critic": {"algorithm": "ppo"},
    "asynchronous": ONE_RANK
    | {
        "algorithm.correction.bypass": True,
        "loop.max_policy_lag": 2,
        "loop.pipeline_depth": 2,
        "cluster.colocate": False,
    },
}
"""Runs in which nothing is wrong either."""
OFFLINE = {
    "mode": "self_test",
    "prompts_per_step": 8,
    "logging.progress": "false",
    "logging.tensorboard": "false",
}


def test_a_right_run_passes_without_a_warning(tmp_path: Path) -> None:
    assert self_test(tmp_path / "run", CLEAN, SMALL) == {"FAIL": [], "WARN": []}
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names == {"self_test"}, "nothing of a run beside it"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OTHERS)
def test_other_right_runs_pass_without_a_warning(kind: str, tmp_path: Path) -> None:
    assert self_test(tmp_path / "run", CLEAN, SETTINGS | OTHERS[kind]) == {"FAIL": [], "WARN": []}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_dense_model_passes_without_a_warning(dtype: str, tmp_path: Path) -> None:
    folder = make_model("Qwen/Qwen3-4B", tmp_path / "dense", shrunk=True)
    draw_weights(folder)
    # A reward that random answers earn.
    reward = {"reward.parts.exact_match.name": f"{REWARD}:score"}
    settings = SETTINGS | reward | {"model.path": folder, "train.parallel": "d1t2", "train.dtype": dtype}
    assert self_test(tmp_path / "run", CLEAN, settings) == {"FAIL": [], "WARN": []}


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["sft_qwen3_moe_tiny", "dpo_qwen3_moe_tiny", "reward_model_qwen3_moe_tiny"])
def test_an_offline_run_is_tested_without_engines(config: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", OFFLINE, config=config) / "self_test"
    findings = json.loads((folder / "self_test.json").read_text())["findings"]
    assert {each["verdict"] for each in findings} == {"PASS", "SKIP"}
    passed = {each["check"] for each in findings if each["verdict"] == "PASS"}
    assert {"run", "weights", "determinism", "mask", "memory"} <= passed


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["second_copy", "off_by_one", "learning"])
def test_a_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path) -> None:
    assert fault in FAULTS
    assert found_by(fault) in {each.partition(",")[0] for each in self_test(tmp_path / "run", fault)["FAIL"]}
