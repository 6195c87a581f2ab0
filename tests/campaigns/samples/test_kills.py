"""A sample of the campaign of kills, and that it sees what would be wrong with a run."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.kills import MODES, PROMPTS, ROUNDS, STEPS, VICTIMS, Run, faults, trial_of
from tests.campaigns.trials import Outcome


def written(output: Path, ledger: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> Path:
    """Returns the folder of a run that wrote these lines."""
    for name, records in (("ledger", ledger), ("metrics", metrics)):
        (output / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return output


def whole() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the ledger and the metrics of a run with nothing wrong."""
    ledger = [{"event": "trained", "lease": lease} for lease in range(STEPS * PROMPTS)]
    steps = [{"step": step, "train/loss": 0.0, "rollout/lag_max": 1} for step in range(1, STEPS + 1)]
    evaluated = [*range(0, STEPS + 1, 3), *([STEPS] if STEPS % 3 else [])]
    return ledger, [*steps, *({"step": step, "evaluation/reward_mean": 0.0} for step in evaluated)]


def test_there_are_twenty_kills() -> None:
    assert len(VICTIMS) * ROUNDS * len(MODES) == 20


def test_nothing_is_wrong_with_a_whole_run(tmp_path: Path) -> None:
    assert faults(written(tmp_path, *whole())) == []


def test_what_is_lost_doubled_or_too_old_is_seen(tmp_path: Path) -> None:
    ledger, metrics = whole()
    assert faults(written(tmp_path, ledger[1:], metrics)) == ["not every lease was trained on once"]
    assert faults(written(tmp_path, [*ledger, ledger[3]], metrics)) == ["not every lease was trained on once"]
    assert faults(written(tmp_path, ledger, metrics[1:]))[0].startswith("steps [2, ")
    assert faults(written(tmp_path, ledger, metrics[:-1]))[0].startswith("evaluations of steps [0, ")
    metrics[4]["rollout/lag_max"] = 2
    assert faults(written(tmp_path, ledger, metrics)) == ["a token was trained on 2 versions later"]
    metrics[4]["rollout/lag_max"], metrics[-1]["evaluation/policy_version"] = 1, 3
    assert faults(written(tmp_path, ledger, metrics)) == ["an evaluation had weights of another step"]


@pytest.mark.thorough
def test_an_asynchronous_run_outlives_an_engine_and_its_driver(tmp_path: Path) -> None:
    kills = Run(tmp_path / "run", MODES["asynchronous"], random.Random(1)).disturbed(["engine", "driver"])
    trials = [trial_of("asynchronous", kill, 0.0) for kill in kills]
    assert [trial.outcome for trial in trials] == [Outcome.SURVIVED] * 2, trials
    assert "restarting engine" in trials[0].said and "started again after" in trials[1].said
