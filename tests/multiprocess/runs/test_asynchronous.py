"""A run that samples ahead loses nothing and doubles nothing, whoever dies: its ledger says so."""

import signal
from pathlib import Path

import pytest

from rlframe.tools.audit import main as audit
from tests.multiprocess.program import ONLINE, Program, lines, logs_to, titled

AHEAD = ONLINE | {
    "steps": 10,
    "checkpoint.every_steps": 2,
    "train.offload_optimizer": False,
    "cluster.colocate": False,
    "loop.max_policy_lag": 2,
    "loop.pipeline_depth": 2,
    "algorithm.correction.bypass": True,
    "rollout.max_tokens": 40,
    "rollout.min_tokens": 30,
    "evaluation.every_steps": 2,
    "evaluation.share": 0.5,
    "weight_sync.hold": "host",
}
"""Responses take longer than a step, so that each death meets some in the middle."""
APART = {key: value for key, value in AHEAD.items() if key != "evaluation.share"} | {
    "rollout.num_engines": 2,
    "evaluation.num_engines": 1,
    "evaluation.every_steps": 3,
    "data.evaluation_count": 16,
}
"""An evaluation takes longer than a step, on an engine of its own."""


def kill(program: Program, title: str) -> None:
    """Kills one of the run's actors of a class."""
    next(each for each in program.started() if titled(each, f"ray::{title}")).send_signal(signal.SIGKILL)


def test_an_engine_the_runner_a_trainer_rank_and_the_driver_may_die(tmp_path: Path) -> None:
    with Program(tmp_path / "run", AHEAD, held=["step 1", "step 3", "step 5", "step 7"]) as program:
        program.wait_for_step(1)
        program.go_on("step 1")
        rank = program.stop_while_it_trains()
        kill(program, "RolloutWorker")
        # It comes back with the published weights, although the trainer is in the middle of a step.
        program.wait_for(lambda: "are back while the policy trains" in program.errors(), every_s=0.05)
        rank.send_signal(signal.SIGCONT)
        for step, victim in ((3, "RunnerWorker"), (5, "MegatronWorker")):
            program.wait_for_step(step)
            kill(program, victim)
            program.go_on(f"step {step}")
        program.wait_for_step(7)
        said = program.errors()
    assert "restarting engine" in said and "restarting the runner of attempts" in said, said
    assert "restarted the trainer's ranks from" in said, said
    # The driver and everything else was killed there; what it left is consistent, with leases in flight.
    assert audit([str(tmp_path / "run")]) == 0
    with Program(tmp_path / "run", AHEAD) as program:
        assert program.finish() == 0, program.errors()
    assert audit([str(tmp_path / "run")]) == 0
    ended = [each for each in lines(tmp_path / "run/ledger.jsonl") if each["event"] != "leased"]
    assert {each["event"] for each in ended} == {"trained"}
    assert sorted(each["lease"] for each in ended) == list(range(40))
    steps = [each for each in lines(tmp_path / "run/metrics.jsonl") if "train/loss" in each]
    assert [each["step"] for each in steps] == list(range(1, 11))
    assert 0 < max(each["rollout/lag_max"] for each in steps) <= 2
    # Training goes on meanwhile, and the weights of the step that was due sampled each evaluation.
    evaluations = [each for each in lines(tmp_path / "run/metrics.jsonl") if "evaluation/reward_mean" in each]
    assert [each["step"] for each in evaluations] == [0, 2, 4, 6, 8, 10]
    assert all(each["evaluation/policy_version"] == each["step"] for each in evaluations)


@pytest.mark.thorough
def test_an_evaluation_has_an_engine_and_weights_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with Program(output, APART, held=["step 3", "step 5", "step 7"]) as program:
        program.wait_for_step(3)
        # The evaluation of step 3 begins. Its engine comes back with the weights of that step.
        next(each for each in program.started() if logs_to(each, "evaluation-0.log")).send_signal(signal.SIGKILL)
        program.go_on("step 3")
        program.wait_for_step(5)
        kill(program, "MegatronWorker")
        program.go_on("step 5")
        program.wait_for_step(7)
        said = program.errors()
    assert said.count("restarting engine 0") == 1 and "evaluation rank 0" in said, said
    assert "is left out" not in said, said
    assert audit([str(output)]) == 0
    with Program(output, APART) as program:
        assert program.finish() == 0, program.errors()
    assert audit([str(output)]) == 0
    written = lines(output / "metrics.jsonl")
    evaluations = [each for each in written if "evaluation/reward_mean" in each]
    assert sorted(each["step"] for each in evaluations) == [0, 3, 6, 9, 10]
    assert all(each["evaluation/policy_version"] == each["step"] for each in evaluations)
    steps = [each for each in written if "train/loss" in each]
    assert [each["step"] for each in steps] == list(range(1, 11)) and "evaluation/engine_restarts" in steps[0]
