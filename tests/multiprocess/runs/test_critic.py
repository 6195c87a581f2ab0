"""PPO as a whole program: the critic learns first and then beside the policy, in its own layout, and both resume."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlframe.cluster.roles import CRITIC
from rlframe.loops.saving.checkpoints import TRAINING, read_state
from tests.multiprocess.program import LEARNING, assert_equal_models, lines, metrics, run

WARM_UP = 2
PPO = LEARNING | {
    "algorithm": "ppo",
    "algorithm.critic_warmup_steps": WARM_UP,
    "algorithm.kl_coefficient": 0.05,
    "algorithm.gae_lambda": 0.95,
    "steps": 6,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_last": 3,
    # The first checkpoint is of the warm-up, in which nothing of the policy is measured.
    "checkpoint.keep_best": 1,
    "checkpoint.best_metric": "train/entropy_nats",
    "train.num_minibatches": 2,
    "train.offload_optimizer": True,
    "train.optimizer.lr": 2.8e-3,
    "train.optimizer.schedule": "linear",
    "train.optimizer.warmup_steps": 0,
    "critic.train.parallel": "d2",
    "critic.train.num_minibatches": 1,
    "critic.train.epochs_per_batch": 3,
    "critic.train.optimizer.lr": 3.4e-3,
    "data.path": "arithmetic#20",
    "rollout.num_engines": 1,
}
"""Two data-parallel ranks of the policy, with the experts shared out, and two of the critic, on the same devices; each
gives its memory back while the other works. The critic takes three optimizer steps a batch and the policy two, with
learning rates of their own; the KL in the reward needs the frozen reference."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nobody disturbed."""
    return run(tmp_path_factory.mktemp("whole") / "run", PPO)


def steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step, in order."""
    return [line for line in lines(folder / "metrics.jsonl") if "critic/loss" in line]


def test_the_critic_warms_up_alone_and_learns(whole: Path) -> None:
    found = steps(whole)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in found if "train/loss" in line] == [3, 4, 5, 6]
    assert all(line["critic/grad_norm"] > 1e-3 for line in found)
    assert all(line["train/grad_norm"] > 1e-3 for line in found[WARM_UP:])
    # At first it says 0 of every state. Later what it says is near what the rollouts earn.
    assert found[0]["critic/loss"] > 3 * found[-1]["critic/loss"]
    assert abs(found[-1]["critic/value_mean"] - found[-1]["critic/return_mean"]) < 0.1
    # Each falls linearly over its own steps. The policy's 8 have 7/7, 6/7, ... of 2.8e-3, so that the pairs' means are
    # 13/14, 9/14, 5/14, 1/14 of it; the critic's 18 have 17/17, 16/17, ... of 3.4e-3, and means of three.
    assert [line["train/lr"] for line in found[WARM_UP:]] == pytest.approx([2.6e-3, 1.8e-3, 1e-3, 2e-4])
    assert [line["critic/lr"] for line in found] == pytest.approx([3.2e-3, 2.6e-3, 2e-3, 1.4e-3, 8e-4, 2e-4])
    # Every step publishes its version, in the warm-up too.
    sampled = [line for line in lines(whole / "samples.jsonl") if line["step"]]
    first = {step: next(line["versions"] for line in sampled if line["step"] == step) for step in range(1, 7)}
    assert first == {step: [step - 1] for step in range(1, 7)}


def test_each_makes_room_for_the_other(whole: Path) -> None:
    assert all(line["memory/critic_offloaded_bytes"] > 0 for line in steps(whole))
    assert all(line["memory/policy_offloaded_bytes"] > 0 for line in steps(whole)[WARM_UP:])


@pytest.mark.thorough
def test_a_run_goes_on_bit_by_bit_from_a_policy_that_has_not_taken_a_step(whole: Path, tmp_path: Path) -> None:
    # What a run leaves that dies between its first checkpoint, at the end of the warm-up, and its second.
    folder = tmp_path / "run"
    later = shutil.ignore_patterns("step-00000004", "step-00000006")
    shutil.copytree(whole, folder, ignore=later)
    (kept,) = (marker.parent for marker in folder.glob("checkpoints/*/COMPLETE"))
    state = read_state(kept)
    assert (state.step, state.num_optimizer_steps, state.num_auxiliary_optimizer_steps) == (
        WARM_UP,
        0,
        {CRITIC: 3 * WARM_UP},
    )
    assert all((kept / name).is_dir() for name in (TRAINING, CRITIC))
    run(folder, PPO)
    assert metrics(folder) == metrics(whole)
    assert lines(folder / "samples.jsonl") == lines(whole / "samples.jsonl")
    assert_equal_models(folder, whole)
    ours, theirs = (load_file(output / "critic" / "model.safetensors") for output in (folder, whole))
    assert ours["score.weight"].shape[0] == 1 and bool(ours["score.weight"].any())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
