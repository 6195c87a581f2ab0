"""A run in turns that carries unfinished groups over loses none of them, also when it is killed and goes on. Seeds of
the same in simulated time: tests/unit/attempts/simulated, tests/campaigns/samples/test_nothing_lost.py."""

import json
from pathlib import Path

import pytest

from rlframe.tools.audit import main as audit
from tests.multiprocess.program import ONLINE, Program, lines

CARRIES = ONLINE | {
    "steps": 4,
    "checkpoint.every_steps": 1,
    "train.offload_optimizer": False,
    "rollout.num_engines": 2,
    "rollout.engines_per_device": 2,
    "rollout.max_tokens": 40,
    "rollout.min_tokens": 20,
    "rollout.oversample": 2,
    "loop.max_policy_lag": 1,
    "algorithm.correction.bypass": True,
}
"""Half of the groups that a step begins are not trained on in it."""


@pytest.mark.thorough
def test_groups_that_a_step_does_not_wait_for_are_trained_on_later(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with Program(output, CARRIES, held=["step 2"]) as program:
        program.wait_for_step(2)
    assert audit([str(output)]) == 0
    with Program(output, CARRIES) as program:
        assert program.finish() == 0, program.errors()
    assert audit([str(output)]) == 0
    ended = [each for each in lines(output / "ledger.jsonl") if each["event"] in ("trained", "dropped")]
    assert sorted(each["lease"] for each in ended) == list(range(16)) and {each["event"] for each in ended} == {
        "trained"
    }
    steps = [each for each in lines(output / "metrics.jsonl") if "train/loss" in each]
    assert [each["step"] for each in steps] == list(range(1, 5))
    assert max(each["rollout/lag_max"] for each in steps) == 1 and steps[-1]["rollout/open_groups"] == 0
    assert all("rollout/carried_groups" in each for each in steps), json.dumps(steps[0])
