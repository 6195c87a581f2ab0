"""Agents at an endpoint: their settings, what they are given and what they say at their end."""

from typing import Any

import numpy as np
import pytest

from rlframe.environments.base import Step, find_environment
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.environments.endpoint import EndpointAgent, EndpointConfig, outcome_of, task_of, without_proxy
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import ConfigError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "environment.options.command or function must be given, and not both of them, got neither"),
    ({"command": ["x"], "function": "a:b"}, "got both"),
    ({"command": ["x"], "options": {"tries": 3}}, "environment.options.options has no effect without function"),
    ({"command": ["x"], "parallel": 0}, "environment.options.parallel must be at least 1"),
    ({"comand": ["x"]}, "environment.options.command"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_settings_that_name_no_agent_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_environment(EnvironmentConfig(name="endpoint", options=options))
    assert why in str(caught.value)


def test_commands_are_limited_and_functions_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, commands in ((1, 4), (2, 8), (16, 64), (128, 64)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert EndpointAgent.most_at_once(EndpointConfig(command=["x"])) == commands
    assert EndpointAgent.most_at_once(EndpointConfig(command=["x"], parallel=2)) == 2
    assert EndpointAgent.most_at_once(EndpointConfig(function="a:b")) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, Step(done=True)),
        (1, Step(done=True, reward=1.0)),
        (True, Step(done=True, reward=1.0)),  # such as said == prompt.answer
        ({"reward": np.False_, "metrics": {"solved": True}}, Step(done=True, metrics={"solved": 1.0})),
        (Step(done=np.all([True]), reward=np.equal("5", "5")), Step(done=True, reward=1.0)),  # pyright: ignore[reportArgumentType]
        ({"metrics": {"tries": 2}, "verdict": "mask"}, Step(done=True, metrics={"tries": 2.0}, verdict=Verdict.MASK)),
        (Step(reward=0.5, verdict=Verdict.RETRY), Step(done=True, reward=0.5, verdict=Verdict.RETRY)),
    ],
)
def test_what_an_agent_says_ends_its_attempt(said: Any, expected: Step) -> None:
    assert outcome_of(said) == expected


@pytest.mark.parametrize("said", ["good", [1.0], float("nan"), 1e9, {"score": 1.0}, {"verdict": "great"}])
def test_what_is_no_outcome_is_refused(said: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        outcome_of(said)


def test_the_task_is_the_last_user_message() -> None:
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert task_of(Prompt(id="p", messages=messages, text="x", input=ModelInput((1,)))) == "c"
    assert task_of(Prompt(id="p", text="x", input=ModelInput((1,)))) == "x"


def test_the_endpoint_is_asked_without_a_proxy() -> None:
    assert without_proxy({}, "10.0.0.1")["NO_PROXY"] == "10.0.0.1"
    assert without_proxy({"no_proxy": "a,10.0.0.1"}, "10.0.0.1")["no_proxy"] == "a,10.0.0.1"
    assert without_proxy({"NO_PROXY": "a"}, "10.0.0.1") == {"NO_PROXY": "a,10.0.0.1", "no_proxy": "a,10.0.0.1"}
