"""What every file of rlframe/rewards must do: build from its config, and survive any text."""

import inspect
import math
import pickle
from dataclasses import is_dataclass
from typing import Any

import pytest

from rlframe.rewards.base import Attempt, Judging, Reward, build_reward
from rlframe.rewards.config import RewardConfig, RewardTerm
from rlframe.rewards.judge.chat import ChatEndpointConfig
from rlframe.rewards.runner import RewardRunner
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Rollout
from rlframe.utils import registry

NAMES = registry.names("rlframe.rewards")
FUNCTIONS = [name for name in NAMES if not issubclass(registry.find("rlframe.rewards", name, key="")[0], Judging)]
"""Those that need nobody else; tests/unit/rewards/test_judge.py has a server for the others."""

# Options of the rewards that have fields without default.
OPTIONS: dict[str, dict[str, Any]] = {
    "format": {"pattern": "42"},
    "length": {"max_tokens": 100, "cache_tokens": 20},
    "judge": {"endpoint": ChatEndpointConfig(base_url="http://127.0.0.1:9/v1", model="m")},
    "python": {"function": "operator:eq"},
}
TASK = {"reasoning_gym": {"name": "gcd", "entry": {"question": "", "answer": "17", "metadata": {}}}}
"""Fields of a record that some rewards need."""
HOSTILE = [
    "",
    " \n\t",
    "\x00",
    "\ud800",
    "\u202e42",
    "42" * 20_000,
    "((((" * 1_000,
    "\\boxed{" * 1_000,
    "$" * 5_000,
    "\\frac{1}{0}",
    "####",
    "#### " + "9" * 5_000,
    "9**9**9**9",
    "__import__('os')._exit(1)",
    "<end><assistant>",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_is_found_by_its_file_name_and_builds_from_its_config(name: str) -> None:
    component, config = registry.find("rlframe.rewards", name, key="reward.parts.it.name")
    assert issubclass(component, Reward)
    assert isinstance(component(config(**OPTIONS.get(name, {}))), component)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_config_has_a_docstring(name: str) -> None:
    _, config = registry.find("rlframe.rewards", name, key="")
    # Of the classes that it is derived from too.
    source = "".join(inspect.getsource(kind) for kind in config.__mro__ if is_dataclass(kind))
    for field in config.__dataclass_fields__:
        after = source.split(f"    {field}: ")[1].split("\n", 1)[1]
        assert after.lstrip().startswith(('"""', 'r"""')), field


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reward_scores_an_attempt_that_crossed_a_process_border(name: str) -> None:
    attempt = Attempt(
        prompt_text="",
        response_text="42",
        answer="42",
        num_response_tokens=1,
        finish_reason=FinishReason.STOP,
        fields=TASK,
    )
    reward = build_reward(RewardTerm(name=name, options=OPTIONS.get(name, {})), key="reward.parts.it")
    score = reward.score(pickle.loads(pickle.dumps(attempt)))
    assert math.isfinite(score)
    assert score == reward.score(attempt), "a reward must be a function of its attempt"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hostile_text_neither_crashes_nor_is_rewarded_as_right(name: str) -> None:
    rollouts = [
        Rollout(
            prompt=Prompt(id=str(index), text="p", input=ModelInput((1,)), answer="17", fields=TASK),
            sample_index=0,
            input=ModelInput([1, 2]),
            loss_mask=[False, True],
            rollout_logprobs=[0.0, -0.1],
            versions=[-1, 0],
            finish_reason=FinishReason.LENGTH,
            text=text,
        )
        for index, text in enumerate(HOSTILE)
    ]
    part = RewardTerm(name=name, options=OPTIONS.get(name, {}) | ({"pattern": r"\A17\Z"} if name == "format" else {}))
    with RewardRunner(RewardConfig(parts={"it": part}, timeout_s=1.5)) as runner:
        runner.score(rollouts)
        assert [one.reward for one in rollouts] == [0.0] * len(rollouts)
        if name == "math_verify":  # the one that calculates, and so can be kept busy for ever
            assert next(one for one in rollouts if one.text == "9**9**9**9").reward_failed
        else:
            assert not any(one.reward_failed for one in rollouts)
