"""Environments with gymnasium's interface: the package's own ones, and a class in a file."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.attempts.sessions.calls import Setup
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.environments.base import Environment, Step, Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.gymnasium import Gymnasium, GymnasiumConfig
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason
from rlframe.utils import outside
from rlframe.utils.errors import ConfigError, SettingError

gymnasium = pytest.importorskip("gymnasium")
LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False, "render_mode": "ansi"}}
ARROWS = {"left": 0, "down": 1, "right": 2, "up": 3}


def prompt(text: str = "", **fields: Any) -> Prompt:
    """A prompt of one message, or of none."""
    messages = ({"role": "user", "content": text},) if text else ()
    return Prompt(id="0", messages=messages, text=text, input=ModelInput(np.zeros(0)), fields=fields)


def said(text: str) -> Turn:
    """What the policy says."""
    return Turn(message={"role": "assistant", "content": text}, text=text, finish_reason=FinishReason.STOP)


def played(environment: Environment, first: Prompt, texts: list[str]) -> tuple[list[dict[str, Any]], list[Step]]:
    """Returns the beginning of a session and the answers to these texts."""

    async def run() -> tuple[list[dict[str, Any]], list[Step]]:
        try:
            opened = list(await environment.reset(first, seed=5))
            return opened, [await environment.step(said(text)) for text in texts]
        finally:
            await environment.close()

    return asyncio.run(run())


def made(**settings: Any) -> Gymnasium:
    """Returns a session."""
    config = GymnasiumConfig(**settings)
    assert not list(Gymnasium.faults(config, EnvironmentConfig()))
    Gymnasium.prepare(config)
    return Gymnasium(config)


def test_a_registered_environment_is_walked_by_the_names_of_its_actions() -> None:
    ways = ["<act>Down</act>", "I go <act>down</act>"]
    ways += [f"<act>{way}</act>" for way in ("right", "right", "down", "right")]
    form = {"observation": "Tile {observation}.", "first_observation": "Begin at {observation}."}
    form["action"] = "<act>(.*?)</act>"
    opened, steps = played(made(**LAKE, actions=ARROWS, metrics=["prob"], **form), prompt("Cross the lake."), ways)
    assert opened == [{"role": "user", "content": "Cross the lake.\n\nBegin at 0."}]
    assert [step.messages for step in steps[:2]] == [
        [{"role": "user", "content": "Tile 4."}],
        [{"role": "user", "content": "Tile 8."}],
    ]
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert steps[-1].done and not steps[-2].done and not steps[-1].messages
    numbers = {"invalid_actions": 0.0, "return": 1.0, "terminated": 1.0, "truncated": 0.0, "prob": 1.0}
    assert steps[-1].metrics == numbers


def test_a_picture_in_characters_is_an_observation() -> None:
    opened, _ = played(made(**LAKE, observation="{render}"), prompt(), [])
    assert "\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG" in opened[0]["content"]


def test_what_is_no_action_is_told_and_costs_nothing_of_the_episode() -> None:
    session = made(**LAKE, max_invalid=3, invalid="No: {error}", invalid_reward=-0.5)
    _, steps = played(session, prompt(), ["7", "left", "", "[0]", "1"][:4])
    told = [step.messages[0]["content"] for step in steps[:3]]
    assert told == [
        "No: '7' is no action of Discrete(4)",
        "No: 'left' is no action of Discrete(4)",
        "No: there is no action in ''",
    ]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].metrics == {"invalid_actions": 4.0, "return": -2.0}


def test_numbers_of_a_space_are_written_as_json() -> None:
    session = made(id="Pendulum-v1", arguments={"max_episode_steps": 2})
    opened, steps = played(session, prompt(), ["[0.5]", "[9]", '{"a": 1}', "[" * 100_000, "[0.25]"])
    assert opened[0]["content"].startswith("[")
    assert [step.metrics["invalid_actions"] for step in steps] == [0.0, 1.0, 2.0, 3.0, 3.0]
    assert steps[-1].done and steps[-1].metrics["truncated"] == 1.0 and steps[-1].reward < 0


PARTS = """
import gymnasium

class Parts:
    spaces = gymnasium.spaces
    whole = spaces.Discrete(3)
    action_space = spaces.Dict({"go": whole, "far": spaces.Tuple([whole, spaces.Box(0, 1)]), "say": spaces.Text(5)})

    def reset(self, *, seed=None, options=None):
        return "begin", {}

    def step(self, action):
        go, (steps, share) = action["go"], action["far"]
        return f"{go} {steps} {share} {action['say']}", 0.0, False, False, {}

    def close(self):
        pass
"""


def test_an_action_of_several_parts_is_an_object_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    session = made(id=f"{tmp_path}/parts.py:Parts", max_invalid=9)
    right = {"go": 2, "far": [1, [0.5]], "say": "hi"}
    wrong = [{"go": 2}, {**right, "more": 1}, {**right, "far": [1]}, {**right, "far": [0.5, [0.5]]}, [right]]
    _, steps = played(session, prompt(), [json.dumps(each) for each in (right, *wrong)])
    assert steps[0].messages[0]["content"] == "2 1 [0.5] hi"
    assert steps[-1].metrics["invalid_actions"] == len(wrong)


def test_half_a_number_is_none_of_the_whole_ones() -> None:
    _, steps = played(made(**LAKE), prompt(), ["1.7", "1"])
    assert steps[0].messages[0]["content"] == "Error: '1.7' is no action of Discrete(4)"
    assert steps[1].messages[0]["content"] == "4"


def test_a_seed_begins_alike() -> None:
    session = {"id": "CartPole-v1"}
    begun = [played(made(**session), prompt(), [])[0] for _ in range(2)]
    assert begun[0] == begun[1]


ECHO = """
import dataclasses

import numpy as np

class Echo:
    def __init__(self, loud=False):
        self.loud = loud

    def reset(self, *, seed=None, options=None):
        return {"word": options["word"], "count": 0}, {}

    def step(self, action):
        if action == "stop":
            next(iter(""))
        seen = {"word": action.upper() if self.loud else action, "count": 1}
        return seen, 0.5, action == "end", False, {"n": len(action), "won": np.bool_(action == "end")}

    def close(self):
        pass
"""


def test_a_class_of_a_file_needs_no_package(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    target = f"{tmp_path}/echo.py:Echo"
    session = made(
        id=target,
        arguments={"loud": True},
        observation="{word} {count} {info}",
        options_field="start",
        metrics=["n", "won"],
    )
    opened, steps = played(session, prompt("Play.", start={"word": "hello"}), ["two words", "end"])
    assert opened[0]["content"] == "Play.\n\nhello 0 {}"
    assert steps[0].messages[0]["content"].startswith("TWO WORDS 1 {'n': 9, ")
    assert steps[0].metrics["won"] == 0.0 and steps[1].metrics["won"] == 1.0
    assert steps[1].done and steps[1].metrics["n"] == 3.0 and steps[1].metrics["return"] == 1.0
    assert target.partition(":")[0] in outside.SOURCES


def test_an_environment_that_raises_stop_iteration_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)

    async def run() -> None:
        session = made(id=f"{tmp_path}/echo.py:Echo", observation="{word}", options_field="start")
        await session.reset(prompt("Play.", start={"word": "hello"}), seed=0)
        with pytest.raises(RuntimeError, match=r"StopIteration\(\)"):
            await asyncio.wait_for(session.step(said("stop")), 5)
        await session.close()

    asyncio.run(run())


@pytest.mark.later
def test_sessions_play_in_their_processes() -> None:
    options = {**LAKE, "actions": ARROWS}
    config = EnvironmentConfig(name="gymnasium", options=options, workers=1)

    async def one(pool: SessionPool, way: str) -> tuple[str, str]:
        session = await pool.open(prompt("Go."), seed=0)
        step = await session.step(said(way))
        await session.close()
        return session.opening.messages[0]["content"], step.messages[0]["content"]

    async def run() -> list[tuple[str, str]]:
        pool = SessionPool(Setup(environment=config, folder=".", sources={}))
        try:
            return await asyncio.gather(*(one(pool, way) for way in ("down", "right", "up", "sideways")))
        finally:
            pool.close()

    answers = asyncio.run(run())
    assert [first for first, _ in answers] == ["Go.\n\n0"] * 4
    assert [second for _, second in answers] == [
        "4",
        "1",
        "0",
        "Error: 'sideways' is none of left, down, right, up",
    ]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"id": "NoSuchLake-v1"}, "gymnasium has no 'NoSuchLake-v1'"),
        ({"id": "no_such_module:Lake-v1"}, "gymnasium has no 'no_such_module:Lake-v1': No module named"),
        ({"id": "no_such_module:Lake"}, "'no_such_module:Lake' cannot be imported"),
        ({"id": "json:decoder"}, "must name a class or a function"),
    ],
)
def test_what_is_not_there_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Gymnasium.prepare(GymnasiumConfig(**settings))
    (fault,) = refused.value.faults
    assert why in str(fault) and "environment.options.id" in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"id": ""}, "id must name an environment"),
        ({"id": "a", "action": "("}, "action must be a regular expression"),
        ({"id": "a", "observation": "{"}, "observation must be a text with"),
        ({"id": "a", "max_invalid": -1}, "max_invalid"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        GymnasiumConfig(**settings)


def test_a_name_that_an_observation_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="names 'word'; there are info, observation"):
        played(made(**LAKE, observation="{word}"), prompt(), [])


MAP = """
import numpy as np

class Map:
    action_space = None

    def reset(self, *, seed=None, options=None):
        return {"tiles": np.arange(1024).reshape(32, 32)}, {}

    def step(self, action):
        return *self.reset()[:1], 0.0, False, False, {}

    def close(self):
        pass
"""


def test_an_observation_of_many_numbers_is_shown_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "maps.py"
    file.write_text(MAP)
    opened, (step,) = played(made(id=f"{file}:Map", first_observation="{tiles}"), prompt(), ["on"])
    for message in (*opened, *step.messages):
        assert list(map(int, re.findall(r"\d+", message["content"]))) == list(range(32 * 32))
