"""The benchmark of lags: every case passes the checks of a run, and begins without a warning."""

import json
import sys
from pathlib import Path

import pytest

from rlframe.run.check import check
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load

sys.path.insert(0, str(Path(__file__).parents[3] / "examples/benchmarks"))

import algorithms
import lag


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0, 1)), ("1", (1, 1)), ("4", (4, 2)), ("4:4", (4, 4))], ids=lambda value: str(value)
)
def test_every_lag_is_a_run_with_a_trust_region(text: str, expected: tuple[int, int]) -> None:
    made = lag.section([text], steps=120)
    run = load("grpo_qwen3_moe", algorithms.Job(section=made, case=text, seed=3, smoke=False).overrides())
    check(run)
    assert (run.loop.max_policy_lag, run.loop.pipeline_depth) == expected
    assert list(algorithm_of(run).cautions(run.facts)) == []
    assert (run.seed, run.steps, run.evaluation.every_steps) == (3, 120, 20)


def test_runs_of_other_settings_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    file = tmp_path / "lag.json"
    assert lag.known(file, {"steps": 1}, []) == {}
    runs = {"0": [{"seed": 0, "curve": [[0, 0.5], [8, 0.75]], "median_of_steps": {"time/step_s": 2.0}}]}
    file.write_text(json.dumps({"settings": {"steps": 1}, "set": [], "lags": runs}))
    assert lag.known(file, {"steps": 1}, []) == runs
    assert lag.known(file, {"steps": 2}, []) == {} == lag.known(file, {"steps": 1}, ["seed=1"])
    assert "| 0 | 0.750 (0.750 to 0.750) | 0.750 (0.750 to 0.750) | 0.00 | 2.00 |" in lag.table(runs)
