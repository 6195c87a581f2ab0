"""Rules of profiles: what a person types first, and what they read if it is wrong."""

import sys
from pathlib import Path

import pytest

from rlframe.run.check import TOPICS, effect, profile
from rlframe.run.load import load
from rlframe.run.profiles import profiled
from rlframe.utils.errors import ConfigError

pytestmark = pytest.mark.later


OURS = (
    profile.processes,
    profile.device,
    profile.nsys,
    *(each.faults for each in effect.NEEDS if "profile" in each.keys),
)


def faults(*overrides: str, config: str = "grpo_qwen3_moe") -> list[str]:
    """The faults of the profile alone: reading the data for each cell takes too long."""
    try:
        run = load(config, list(overrides))
    except ConfigError as error:
        return list(map(str, error.faults))
    return [str(fault) for topic in OURS for fault in topic(run)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["profile.steps=[0]"], "profile.steps must be at least 1, got 0"),
        (["profile.steps=[2,2]"], "profile.steps must name each once, got [2, 2]"),
        (["steps=5", "profile.steps=[3,6]"], "profile.steps must not exceed steps=5, got [6]"),
        (["profile.tool=nsys"], "profile.tool has no effect with profile.steps=[], got nsys; remove it"),
        (
            ["profile.steps=[1]", "profile.stacks=true", "profile.tool=nsys"],
            "profile.stacks has no effect with tool=nsys",
        ),
        (["profile.steps=[1]", "profile.roles=[polici]"], "got polici; did you mean policy?"),
        (
            ["profile.steps=[1]", "profile.roles=[critic]"],
            "policy, engines, runner, driver, which this run has, got critic",
        ),
        (["profile.steps=[1]", "profile.roles=[]"], "profile.roles must not be empty"),
        (["profile.steps=[1]", "profile.ranks=[2]"], "must be below 2 (policy has 2; they count from 0), got [2]"),
        (["profile.steps=[1]", "profile.engines=[7]"], "profile.engines must be below"),
        (["profile.steps=[1]", "profile.roles=[engines]", "profile.ranks=[1]"], "profile.ranks has no effect, got [1]"),
        (
            ["profile.steps=[1]", "profile.tool=memory"],
            "profile.tool must be torch on a CPU, got memory: memory records",
        ),
        (["profile.steps=[1]", "profile.tool=nsys"], "needs the program nsys on every node"),
        (["profile.steps=[1]", "profile.tool=memory", "profile.roles=[driver]"], "profile.roles must not hold driver"),
        (["profile.steps=[1]", "mode=evaluate"], "profile.steps must be [] with mode=evaluate"),
        (["profile.steps=[1]", "mode=generate"], "profile.steps must be [] with mode=generate"),
    ],
)
def test_a_wrong_profile_is_refused(overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert any(said in fault for fault in faults(*overrides)), faults(*overrides)


def test_vllm_records_no_memory_and_has_no_second_profiler() -> None:
    engines = ["rollout=vllm", "profile.steps=[1]", "cluster.device=cuda"]
    (said,) = [each for each in faults(*engines, "profile.tool=memory", "profile.roles=[engines]") if "vLLM" in each]
    assert "must be torch or nsys for engines of vLLM" in said
    own = faults(*engines, "profile.roles=[engines]", "rollout.engine_options.profiler_config.profiler=torch")
    assert any("rollout.engine_options.profiler_config must not be set" in each for each in own)


def test_every_role_that_the_tool_can_record_is_profiled_unless_some_are_named() -> None:
    run = load("grpo_qwen3_moe", ["profile.steps=[1]", "profile.ranks=[1]"])
    everything = {"policy": [1], "engines": [0], "runner": [0], "driver": [0]}
    assert profiled(run, online=True, has_critic=False) == everything
    run = load("grpo_qwen3_moe", ["profile.steps=[1]", "profile.tool=nsys"])
    assert profiled(run, online=True, has_critic=False) == {"policy": [0], "engines": [0]}
    run = load("dpo_qwen3_moe_tiny", ["profile.steps=[1]", "profile.roles=[driver]"])
    assert profiled(run, online=False, has_critic=False) == {"driver": [0]}
    assert profiled(load("grpo_qwen3_moe", []), online=True, has_critic=False) == {}


def test_the_rules_are_among_those_of_a_configuration() -> None:
    assert set(OURS) <= TOPICS.keys()
