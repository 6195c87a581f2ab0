"""A recorded run's training is repeated from its recording, bit for bit, without anything that samples or judges."""

from pathlib import Path
from typing import Any

import pytest

from rlframe.attempts.account.recording import step_folder
from rlframe.attempts.account.stored import read_groups
from rlframe.types.rollout import members
from tests.multiprocess.program import ONLINE, Program, assert_equal_models, lines, metrics, run, samples, titled

RECORDED = ONLINE | {
    "steps": 3,
    "checkpoint.every_steps": 1,
    "train.moe.router_replay": "true",
    "algorithm.correction.weight": "token",
    "algorithm.correction.weight_cap": 2.0,
}
ELSEWHERE = {"data.path": "/of/the/cluster.jsonl", "reward.parts.exact_match.name": "/of/the/cluster.py:score"}
"""Neither the data nor the rewards are on the machine that replays."""
OF_ENGINES = {"weight_sync/bytes", "rollout/engine_restarts", "data/epoch"}
"""Metrics of what a replay does not have."""


def trained(folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step that do not depend on the clock or on engines."""
    written = [line for line in metrics(folder) if "train/loss" in line]
    return [{key: value for key, value in line.items() if key not in OF_ENGINES} for line in written]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("recorded") / "run", RECORDED | {"rollout.record": "true"})


def test_a_recording_has_every_trained_group(recorded: Path) -> None:
    for line in lines(recorded / "metrics.jsonl"):
        if "train/loss" not in line:
            continue
        rollouts = members(read_groups(step_folder(recorded, line["step"])))
        assert [rollout.text for rollout in rollouts] == [
            sample["response"] for sample in samples(recorded, line["step"], count=len(rollouts))
        ]
        assert sum(rollout.num_tokens for rollout in rollouts) == line["rollout/tokens"]
        assert all(rollout.routes is not None for rollout in rollouts)
        assert line["time/record_s"] > 0


def test_a_replay_gives_equal_losses_gradients_and_weights_without_engines(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    with Program(folder, RECORDED | ELSEWHERE | {"rollout.replay": recorded}, held=["step 1"]) as program:
        program.wait_for_step(1)
        assert any(titled(child, "ray::MegatronWorker") for child in program.children)
        assert not any(titled(child, "ray::RolloutWorker") for child in program.children)
        program.go_on("step 1")
        assert program.finish() == 0, program.errors()
    assert [line["step"] for line in trained(folder)] == [1, 2, 3]
    assert trained(folder) == trained(recorded) and all(line["train/grad_norm"] > 0 for line in trained(folder))
    assert_equal_models(folder, recorded)
    written = lines(folder / "metrics.jsonl")
    assert not any(key.startswith("evaluation/") for line in written for key in line)


@pytest.mark.thorough
def test_a_replay_that_was_killed_goes_on_to_the_same_weights(recorded: Path, tmp_path: Path) -> None:
    folder, settings = tmp_path / "replay", RECORDED | ELSEWHERE | {"rollout.replay": recorded}
    with Program(folder, settings, held=["step 2"]) as program:
        program.wait_for(lambda: (folder / "checkpoints" / "step-00000001" / "COMPLETE").exists())
        program.kill()
    run(folder, settings)
    assert trained(folder) == trained(recorded)
    assert_equal_models(folder, recorded)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["ppo", "dapo"])
def test_other_algorithms_replay_too(algorithm: str, tmp_path: Path) -> None:
    """One with a critic, and one that trains on fewer groups than it samples."""
    settings = RECORDED | {"algorithm": algorithm, "rollout.max_tokens": 3}
    changes = {"ppo": {"algorithm.group_size": 1}, "dapo": {"algorithm.mask_truncated": "false"}}[algorithm]
    settings = {key: value for key, value in settings.items() if not key.startswith("algorithm.")} | changes
    assert_replayed(tmp_path, settings)


@pytest.mark.thorough
def test_what_was_trained_on_late_is_replayed_too(tmp_path: Path) -> None:
    split = {"loop.max_policy_lag": 2, "cluster.colocate": "false", "train.offload_optimizer": "false"}
    settings = RECORDED | split
    assert_replayed(tmp_path, settings)
    lags = [line["rollout/lag_max"] for line in trained(tmp_path / "recorded")]
    assert max(lags) > 0, lags


def assert_replayed(folder: Path, settings: dict[str, Any]) -> None:
    """Records three steps and replays them."""
    ours = run(folder / "recorded", settings | {"rollout.record": "true"})
    # Nothing is sampled ahead in a replay.
    again = {key: value for key, value in settings.items() if not key.startswith("loop.")}
    theirs = run(folder / "replay", again | {"rollout.replay": ours})
    assert len(trained(theirs)) == 3
    known = trained(theirs)[0].keys()
    assert "train/loss" in known and "train/grad_norm" in known
    assert trained(theirs) == [{key: line[key] for key in known} for line in trained(ours)]
    assert_equal_models(ours, theirs)
