"""Runs of agents that ask at an endpoint: the same numbers as with an environment that says the same."""

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.program import ROOT, lines, metrics, run

pytest.importorskip("openai")
SETTINGS = {
    "steps": 1,
    "prompts_per_step": 4,
    "algorithm.group_size": 4,
    "data.evaluation_count": 4,
    "evaluation.every_steps": 1,
    "environment.max_turns": 4,
    "rollout.num_engines": 1,
    "checkpoint.export": "false",
    "logging.progress": "false",
    "logging.tensorboard": "false",
}
AGENT = SETTINGS | {
    "environment": "endpoint",
    "environment.options.function": f"{ROOT}/examples/agents/calculator.py:answer",
}
COMMAND = SETTINGS | {
    "environment": "endpoint",
    "environment.options.command": f"[python,{ROOT}/examples/agents/calculator.py]",
}


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What a run has sampled and learned. The last bits of the engine's logprobs are left out: they depend on what it
    samples at the same time."""
    kept = ("step", "reward/", "train/", "evaluation/", "rollout/tokens", "rollout/response_tokens")
    return [{name: line[name] for name in line if name.startswith(kept)} for line in metrics(folder)]


@pytest.mark.thorough
def test_agents_are_trained_on_and_evaluated(tmp_path: Path) -> None:
    folder = run(tmp_path / "agents", AGENT, config="grpo_calculator")
    steps = lines(folder / "metrics.jsonl")
    (step,) = (line for line in steps if "train/loss" in line)
    assert step["train/grad_norm"] > 0 and step["rollout/logprob_gap_max_nats"] < 1e-4
    assert step["environment/turns_mean"] == 1.0 + step["environment/tool_calls_mean"] > 1.0
    assert not any(name in step for name in ("environment/raised", "environment/forked", "environment/calls_refused"))
    assert sum("evaluation/reward_mean" in line for line in steps) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("agent", [AGENT, COMMAND])
def test_an_agent_with_a_calculator_learns_what_tools_teach_bit_for_bit(tmp_path: Path, agent: dict[str, Any]) -> None:
    tools = run(tmp_path / "tools", SETTINGS, config="grpo_calculator")
    agents = run(tmp_path / "agents", agent, config="grpo_calculator")
    assert numbers(agents) == numbers(tools)
    said = [
        [(each["id"], each["response"], each["reward"]) for each in lines(folder / "samples.jsonl")]
        for folder in (agents, tools)
    ]
    assert sorted(said[0]) == sorted(said[1])
