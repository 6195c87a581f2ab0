"""The text of `--help`."""

import pytest

from rlframe.run.settings.help import overview, topic
from rlframe.utils.errors import UsageError


def text_of(name: str) -> str:
    return "\n".join(topic(name, width=100))


def test_the_overview_has_every_section_once_and_refers_to_the_rest() -> None:
    lines = list(overview(tools=["doctor"], names=["grpo_qwen3_moe"], groups=["algorithm"], width=100))
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "starts a tool: doctor" in text and "Configurations: grpo_qwen3_moe" in text
    assert "    grpo: GRPO's settings." in lines and "    math_verify: " in text
    assert (
        lines.count(
            "rollout.temperature=1.0  (float, above 0, at most 100 (a policy that never explores cannot learn))"
        )
        == 1
    )
    assert "    Its settings are those of rollout." in lines
    assert "output=outputs/ and the name  (str)" in lines


def test_a_section_a_setting_and_a_component_are_topics() -> None:
    assert text_of("train.optimizer").startswith(
        "train.optimizer\n  Settings of the optimizer and its learning rate.\n"
    )
    assert "train.parallel" not in text_of("train.optimizer")
    assert text_of("train.optimizer.lr") == (
        "train.optimizer.lr=1e-06  (float, above 0, at most 10)\n    Peak learning rate."
    )
    assert "algorithm.clip_low=" in text_of("algorithm.grpo") and "algorithm.name=grpo" in text_of("algorithm.grpo")
    assert text_of("algorithm.grpo.credit").startswith("algorithm.credit\n")


def test_a_component_says_where_its_settings_stand() -> None:
    assert "reward.parts.NAME.options.max_tokens=" in text_of("reward.length")
    assert "environment.options.tools.NAME.options.corpus=... must be given" in text_of("environment.tools.search")
    assert "(--help environment.tools.NAME)" in text_of("environment.tools")
    own = text_of("rollout.vllm")
    assert "rollout.gpu_memory_utilization=0.5" in own and "rollout.temperature" not in own


def test_the_values_of_a_setting_are_explained() -> None:
    assert "        wsd: Warm-up, stable, decay: " in text_of("train.optimizer.schedule")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("train.optimzer", "train.optimizer"),
        ("lr", "train.optimizer.lr"),
        ("algorithm.grp0", "algorithm.grpo"),
        ("grpo", "algorithm.grpo"),
        ("algoritm", "algorithm"),
        ("temprature", "rollout.temperature"),
    ],
)
def test_a_topic_that_is_none_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError) as caught:
        text_of(name)
    assert str(caught.value).endswith(f"got '{name}'; did you mean {nearest}?")
