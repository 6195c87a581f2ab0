"""The sections that a topic says it reads: without one of them it is not asked, because a default in its place is no
value of the user's."""

import sys
from dataclasses import fields
from typing import Any

import pytest

from rlframe.run.check import TOPICS, check_reward, memory
from rlframe.run.config import RunConfig
from rlframe.run.load import load

pytestmark = pytest.mark.thorough

KNOWN = {"mode", "algorithm"}
"""Sections of which topics always know enough: without a mode none is asked, and an algorithm keeps its name."""
FEWER = {check_reward: {"seed"}}
"""Sections without which a topic sees less, but nothing wrong."""
OF_ALL = ("Need.faults", "changed", "check_bounds", "RunConfig.__post_init__")
"""Functions that go through all sections."""
NAMES = {field.name for field in fields(RunConfig)}
SEEN: set[str] = set()


class Watched(RunConfig):
    """Notes which of its sections are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in NAMES:
            reader = sys._getframe(1)
            if reader.f_globals["__name__"] != "dataclasses" and not reader.f_code.co_qualname.startswith(OF_ALL):
                SEEN.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("grpo_qwen3_moe_async", []),
        ("grpo_calculator", ["+reward.model.path=qwen3_moe_tiny"]),
        ("grpo_qwen3_moe", ["mode=evaluate", "environment.name=gymnasium", "~reward.parts"]),
        ("grpo_qwen3_moe", ["mode=generate", "generation.max_tokens=8", "rollout=vllm"]),
        ("grpo_qwen3_moe", ["mode=self_test", "+train.lora.rank=4", "weight_sync.lora=adapter"]),
        ("grpo_qwen3_moe", ["algorithm=ppo", "+critic.train.num_minibatches=3", "profile.steps=[1]"]),
        ("gkd_qwen3_moe_tiny", []),
        ("dpo_qwen3_moe_tiny", []),
    ],
)
def test_a_topic_names_every_section_that_it_reads(config: str, overrides: list[str]) -> None:
    run = load(config, overrides)
    watched = Watched(**{name: getattr(run, name) for name in NAMES})
    undeclared = {}
    for topic, declared in TOPICS.items():
        SEEN.clear()
        if topic is not memory.faults:
            list(topic(watched))
        if further := SEEN - declared - KNOWN - FEWER.get(topic, set()):
            undeclared[topic] = further
    assert undeclared == {}
