"""Which curricula a run can follow."""

from pathlib import Path

import pytest

from rlframe.run.check import check
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

pytestmark = pytest.mark.later

PASS_RATE = ["data.curriculum.by=pass_rate", "data.curriculum.target=0.5"]


def faults(config: str, *overrides: str) -> list[str]:
    try:
        check(load(config, list(overrides)))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        [*PASS_RATE, "data.curriculum.reward_part=exact_match"],
        ["data.curriculum.by=field", "data.curriculum.field=level"],
        ["data.curriculum={by: stage, field: level, stages: {easy: 1, hard: 200}}"],
        [*PASS_RATE, "cluster.colocate=false", "loop.max_policy_lag=2"],
    ],
    ids=" ".join,
)
def test_prompts_may_have_an_order(overrides: list[str]) -> None:
    assert faults("grpo_qwen3_moe", *overrides) == []


@pytest.mark.parametrize(
    ("config", "overrides", "fault"),
    [
        (
            "grpo_qwen3_moe",
            [*PASS_RATE, "data.curriculum.reward_part=brevity"],
            "data.curriculum.reward_part must be one of reward.parts, exact_match, got 'brevity'",
        ),
        (
            "grpo_qwen3_moe",
            ["data.curriculum={by: stage, field: level, stages: {easy: 1, hard: 501}}"],
            "data.curriculum.stages.hard must be at most steps=500, got 501; remove the stage",
        ),
        (
            "grpo_qwen3_moe",
            [*PASS_RATE, "data.curriculum.lowest=1.5"],
            "data.curriculum.lowest must be at most 1, got 1.5",
        ),
        (
            "sft_qwen3_moe_tiny",
            PASS_RATE,
            "data.curriculum has no effect with algorithm.name=sft, which trains on examples, got pass_rate; remove it",
        ),
    ],
)
def test_an_order_that_cannot_be_is_refused(config: str, overrides: list[str], fault: str) -> None:
    assert faults(config, *overrides) == [fault]


def test_an_environments_rewards_are_pass_rates_without_parts(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlframe.environments.base import Environment\n"
        "class Mine(Environment):\n    rewards = True\n    def __init__(self, config):\n        pass\n"
    )
    settings = [*PASS_RATE, f"environment.name={file}:Mine", "~reward"]
    assert not [fault for fault in faults("grpo_qwen3_moe", *settings) if "curriculum" in fault]
    (fault,) = [
        fault
        for fault in faults("grpo_qwen3_moe", *settings, "data.curriculum.reward_part=exact_match")
        if "curriculum" in fault
    ]
    assert fault.startswith(
        "data.curriculum.reward_part must be one of reward.parts, of which there is none, got 'exact_match'"
    )


def test_pass_rates_need_a_reward() -> None:
    found = faults("gkd_qwen3_moe_tiny", *PASS_RATE, "~reward")
    assert "data.curriculum.by needs a reward, got pass_rate: nothing else is a pass rate" in found
