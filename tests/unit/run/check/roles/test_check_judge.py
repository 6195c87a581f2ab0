"""A judge that cannot be asked, or credit and judges without effect, are refused before anything starts."""

import json
import shutil
from pathlib import Path

import pytest

from rlframe.models.hub import EMBEDDED
from rlframe.run.check import check
from rlframe.run.check.roles import judge as check_judge
from rlframe.run.load import load
from rlframe.run.roles import topology
from rlframe.utils.errors import ConfigError

JUDGE = "judge.path=qwen3_moe_tiny"


def faults(*overrides: str, config: str = "grpo_calculator") -> list[str]:
    """Those of the judge alone."""
    return list(map(str, check_judge.faults(load(config, [JUDGE, *overrides]))))


def test_a_judge_is_taken_and_gets_devices_of_its_own() -> None:
    run = load("grpo_calculator", [JUDGE, "judge.engine.num_engines=2", "judge.template={response}"])
    check(run)
    (role,) = [role for role in topology(run, online=True, has_critic=False).roles if role.name == "judge_engines"]
    assert role.num_devices == 2 and "judge.engine" in role.setting
    assert run.reward_names == ["exact_match", "judge_model"]


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["judge.engine.temperature=0.5"], "judge.engine.temperature has no effect, got 0.5: a judge answers greedily"),
        (["judge.engine.cache_after_sync=keep"], "judge.engine.cache_after_sync has no effect"),
        (["judge.engine.record=true"], "judge.engine.record has no effect"),
        (["judge.engine.oversample=2"], "judge.engine.oversample has no effect"),
        (["judge.engine.max_tokens=100000"], "judge.engine.max_tokens must be below the"),
        (["rendering.history=fork"], "judge.path cannot be used with rendering.history=fork"),
    ],
)
def test_what_does_nothing_for_a_judge_is_refused(overrides: list[str], rule: str) -> None:
    (found,) = faults(*overrides)
    assert found.startswith(rule)


def test_a_judge_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "qwen3_moe_tiny" / name, tmp_path / name)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"})
    )
    assert [f for f in faults(f"judge.path={tmp_path}") if "must name a model with a chat template" in f]


@pytest.mark.parametrize(
    ("config", "overrides", "rule"),
    [
        ("sft_qwen3_moe_tiny", [JUDGE], "judge.path has no effect with algorithm.name=sft"),
        ("grpo_calculator", [JUDGE, "reward.parts.judge_model.name=length"], "must not be called 'judge_model'"),
        (
            "grpo_calculator",
            ["environment=single_turn", "algorithm.credit.by=turn"],
            "algorithm.credit.by has no effect with environment.name=single_turn",
        ),
        (
            "grpo_calculator",
            [
                "reward=judge",
                "reward.parts.judge.options.endpoint.base_url=http://a/v1",
                "reward.parts.judge.options.endpoint.model=m",
                "reward.parts.judge.options.endpoint.api_key_variable=NO_SUCH_KEY",
            ],
            "reward.parts.judge.options.endpoint.api_key_variable must name an environment variable that is set",
        ),
    ],
)
def test_across_sections(config: str, overrides: list[str], rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(load(config, overrides))
    assert rule in str(refused.value)
