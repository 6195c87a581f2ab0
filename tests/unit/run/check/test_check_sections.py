"""The sections that a topic says it reads: without one of them it is not asked, because a default in its place is no
value of the user's."""

import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlframe.config.load import composed
from rlframe.models.hub import EMBEDDED
from rlframe.run.check import TOPICS, check_reward, checked, memory
from rlframe.run.config import RunConfig
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

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


def reads_a_switch(folder: Path) -> str:
    """A model whose chat template has a switch, which that of the default model has not."""
    shutil.copytree(EMBEDDED / "qwen3_moe_tiny", folder)
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{% if enable_thinking %}{% endif %}")
    return f"model.path={folder}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["environment.max_turns=abc", "environment.name=gymnasium", "~reward.parts"],
        ["prompts_per_step=abc", "algorithm=ppo", "+critic.train.num_minibatches=3"],
        ["model.random_init=abc", "data.chat_template_kwargs={enable_thinking: false}"],
        ["mode=generat", "train.max_tokens_per_microbatch=16"],
    ],
)
def test_a_default_in_the_place_of_a_wrong_value_is_no_further_fault(tmp_path: Path, overrides: list[str]) -> None:
    values = composed("grpo_qwen3_moe", [reads_a_switch(tmp_path / "model"), *overrides])
    with pytest.raises(ConfigError) as caught:
        checked(values)
    assert [f"{fault.key}" for fault in caught.value.faults] == [overrides[0].partition("=")[0]]


def test_a_wrong_value_of_the_algorithm_does_not_hide_a_missing_file() -> None:
    with pytest.raises(ConfigError) as caught:
        checked(composed("grpo_qwen3_moe", ["algorithm.group_size=abc", "data.path=nowhere.jsonl"]))
    assert [fault.section for fault in caught.value.faults] == ["algorithm", "data"]
