"""DPO and KTO of the embedded model, which prefers wrong answers: on held-out problems it learns the right ones."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlframe.run.check import check
from rlframe.run.compose.run import run
from rlframe.run.folder import claim
from rlframe.run.load import load
from tests.multiprocess.forks import forked_workers
from tests.multiprocess.program import metrics

SETTINGS = {
    "steps": 4,
    "prompts_per_step": 32,
    "evaluation.every_steps": 2,
    "data.evaluation_count": 32,
    "train.optimizer.lr": 1e-3,
    "train.optimizer.schedule": "constant",
    "train.optimizer.warmup_steps": 0,
    "checkpoint.every_steps": 2,
    "checkpoint.export": "false",
    "logging.progress": "false",
    "logging.tensorboard": "false",
}


def train(folder: Path, config: str, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a run in this process, which its actors' processes outlive by nothing."""
    overrides = {**SETTINGS, "output": folder, "data.cache_folder": folder.parent / "cache", **settings}
    config = load(config, [f"{key}={value}" for key, value in overrides.items()])
    check(config)
    with closing(claim(config)), forked_workers():
        run(config)
    return metrics(folder)


def evaluations(lines: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Those of `lines` that are evaluations, by step."""
    return {line["step"]: line for line in lines if "evaluation/loss" in line}


@pytest.mark.thorough
def test_dpo_learns_the_same_from_a_live_and_from_a_precomputed_reference(tmp_path: Path) -> None:
    few = {"data.path": "arithmetic_preferences#160"}
    precomputed = few | {"algorithm.reference": "precomputed"}
    live = train(tmp_path / "live", "dpo_qwen3_moe_tiny", **few)
    held_out = evaluations(live)
    assert list(held_out) == [0, 2, 4]
    # The policy is the reference: log 2, and no margin.
    assert held_out[0]["evaluation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert held_out[0]["evaluation/reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert held_out[0]["evaluation/loss"] > held_out[2]["evaluation/loss"] > held_out[4]["evaluation/loss"]
    assert held_out[4]["evaluation/reward_margin"] > 0.1 and held_out[4]["evaluation/accuracy"] > 0.8

    # Stopped after step 2, so that the rest of it must find the reference of the first weights in the file.
    folder = tmp_path / "precomputed"
    train(folder, "dpo_qwen3_moe_tiny", **precomputed | {"steps": 2})
    (file,) = (folder / "reference").iterdir()
    made = file.stat().st_mtime_ns
    resumed = train(folder, "dpo_qwen3_moe_tiny", **precomputed)
    assert file.stat().st_mtime_ns == made and [file] == list((folder / "reference").iterdir())
    assert [line["step"] for line in resumed] == [line["step"] for line in live]
    for ours, theirs in zip(resumed, live, strict=True):
        if ours["step"] == 1:
            # Of margins that are 0 but for rounding.
            ours, theirs = ({key: line[key] for key in line if key != "train/accuracy"} for line in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_kto_learns_to_tell_the_classes_apart(tmp_path: Path) -> None:
    held_out = evaluations(train(tmp_path / "kto", "kto_qwen3_moe_tiny", **{"data.path": "arithmetic_unpaired#160"}))
    assert held_out[0]["evaluation/loss"] == pytest.approx(0.5, abs=1e-5)
    assert held_out[4]["evaluation/loss"] < held_out[0]["evaluation/loss"] - 0.005
    assert held_out[4]["evaluation/desirable_reward"] > held_out[4]["evaluation/undesirable_reward"] + 0.05
