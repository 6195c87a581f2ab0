"""Environments behind real servers of openenv-core."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlframe.attempts.sessions.calls import SessionFailed, Setup
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.environments.base import Step, Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.openenv import OpenEnv, OpenEnvConfig
from rlframe.environments.stepping import InvalidAction
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason
from rlframe.utils.errors import SettingError

SERVER = Path(__file__).with_name("openenv_server.py")
START_LIMIT_S = 120.0
JSON = {"observation": "Total {total}. {hint}"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of the two servers."""
    pytest.importorskip("openenv")
    ports = tmp_path_factory.mktemp("openenv") / "ports"
    with subprocess.Popen([sys.executable, str(SERVER), str(ports)]) as process:
        try:
            end = time.monotonic() + START_LIMIT_S
            while not (ports.exists() and ports.read_text().count("\n") == 2):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            first, second = ports.read_text().split()
            yield f"http://127.0.0.1:{first}", f"ws://127.0.0.1:{second}"
        finally:
            process.kill()


def prompt(**fields: Any) -> Prompt:
    """A prompt of one message."""
    message = {"role": "user", "content": "Reach 10."}
    return Prompt(id="0", messages=(message,), text="", input=ModelInput(np.zeros(0)), fields=fields)


def said(text: str, *calls: tuple[str, dict[str, Any]], malformed: tuple[str, ...] = ()) -> Turn:
    """What the policy says."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": str(index), "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return Turn(message=message, text=text, finish_reason=FinishReason.STOP, malformed=malformed)


def played(config: OpenEnvConfig, first: Prompt, turns: list[Turn]) -> tuple[OpenEnv, list[Any], list[Step]]:
    """Returns a session after these turns, its beginning, and the answers."""

    async def run() -> tuple[OpenEnv, list[Any], list[Step]]:
        OpenEnv.prepare(config)
        session = OpenEnv(config)
        try:
            opened = list(await session.reset(first, seed=7))
            return session, opened, [await session.step(turn) for turn in turns]
        finally:
            await session.close()

    return asyncio.run(run())


@pytest.mark.thorough
def test_an_episode_is_played_with_actions_as_json(servers: tuple[str, str]) -> None:
    config = OpenEnvConfig(url=servers[0], options_field="begin", **JSON)
    turns = [said('{"number": 4}'), said("four"), said('{"numbr": 4}'), said('{"number": 4}')]
    _, opened, steps = played(config, prompt(begin={"start": 2}), turns)
    assert opened == [{"role": "user", "content": "Reach 10.\n\nTotal 2. seed 7"}]
    assert steps[0].messages == [{"role": "user", "content": "Total 6. more"}]
    assert steps[1].messages[0]["content"] == "Error: 'four' is no JSON object"
    assert "VALIDATION_ERROR" in steps[2].messages[0]["content"]
    assert steps[3].done and steps[3].reward == 1.0
    assert steps[3].metrics == {"invalid_actions": 2.0, "return": 1.0}


def test_what_is_nested_too_deeply_is_no_action() -> None:
    with pytest.raises(InvalidAction, match="is no JSON object"):
        OpenEnv(OpenEnvConfig(url="http://127.0.0.1:1", **JSON)).action_of("[" * 100_000)


@pytest.mark.thorough
def test_a_field_takes_the_text_that_the_pattern_finds(servers: tuple[str, str]) -> None:
    config = OpenEnvConfig(url=servers[0], action_field="number", action=r"add (-?\d+)", reset={"start": 5})
    _, opened, steps = played(config, prompt(), [said("first add 1, no: add 2"), said("add 9")])
    assert opened[0]["content"] == 'Reach 10.\n\n{"total": 5, "hint": "seed 7"}'
    assert steps[0].messages[0]["content"] == '{"total": 7, "hint": "more"}'
    assert steps[1].done and steps[1].reward == 0.0


@pytest.mark.thorough
def test_tools_of_an_environment_are_offered_and_called(servers: tuple[str, str]) -> None:
    config = OpenEnvConfig(url=servers[1], tools=True, observation="Keep notes.", max_invalid=1)
    calls = [("note", {"text": "a"}), ("note", {"text": ""}), ("nothing", {})]
    turns = [said("", *calls), said("", malformed=("it is no JSON",)), said("done")]
    session, opened, steps = played(config, prompt(), turns)
    assert [tool["function"]["name"] for tool in session.tools] == ["note"]
    assert session.tools[0]["function"]["parameters"]["required"] == ["text"]
    assert opened[0]["content"] == "Reach 10.\n\nKeep notes."
    answers = [(message["tool_call_id"], message["content"]) for message in steps[0].messages]
    assert answers == [
        ("0", "1 notes"),
        ("1", "Error: Error calling tool 'note': nothing to keep"),
        ("2", "Error: Unknown tool: 'nothing'"),
    ]
    assert steps[1].messages == [{"role": "user", "content": "Error: it is no JSON"}]
    assert steps[2].done and steps[2].metrics["invalid_actions"] == 1.0


def test_calls_that_could_be_read_are_made_beside_one_that_could_not() -> None:
    class Server:
        """The client of a server whose tool gives what it is called with."""

        async def step(self, action: dict[str, Any]) -> SimpleNamespace:
            observation = {"result": action["arguments"]["text"]}
            return SimpleNamespace(observation=observation, reward=1.0, done=action["arguments"]["text"] == "z")

    def answer(*texts: str) -> Step:
        session = OpenEnv(OpenEnvConfig(url="http://a", tools=True, max_invalid=1, invalid_reward=-0.25))
        session._client = Server()
        calls = [("note", {"text": text}) for text in texts]
        return asyncio.run(session.step(said("", *calls, malformed=("it is no JSON",))))

    step = answer("a", "b")
    assert [message["content"] for message in step.messages] == ["a", "b", "Error: it is no JSON"]
    assert (step.reward, step.done, step.metrics) == (1.75, False, {"invalid_actions": 1.0, "return": 1.75})
    assert answer("a", "z").done


@pytest.mark.thorough
def test_sessions_of_a_process_have_episodes_of_their_own(servers: tuple[str, str]) -> None:
    options = {"url": servers[0], "action_field": "number", **JSON}
    setup = Setup(environment=EnvironmentConfig(name="openenv", options=options, workers=1), folder=".", sources={})

    async def one(pool: SessionPool, number: int) -> str:
        session = await pool.open(prompt(), seed=0)
        await session.step(said(str(number)))
        step = await session.step(said("1"))
        await session.close()
        return step.messages[0]["content"]

    async def run() -> list[str]:
        pool = SessionPool(setup)
        try:
            return await asyncio.gather(*(one(pool, number) for number in range(4)))
        finally:
            pool.close()

    assert asyncio.run(run()) == [f"Total {number + 1}. more" for number in range(4)]


@pytest.mark.thorough
def test_a_server_that_is_not_there_fails_the_attempt() -> None:
    pytest.importorskip("openenv")
    options = {"url": "http://127.0.0.1:9"}
    setup = Setup(environment=EnvironmentConfig(name="openenv", options=options, workers=1), folder=".", sources={})

    async def run() -> None:
        pool = SessionPool(setup)
        try:
            with pytest.raises(SessionFailed, match="Failed to connect to ws://127.0.0.1:9"):
                await pool.open(prompt(), seed=0)
        finally:
            pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "localhost:8000"}, "url must begin with http://"),
        ({"url": "http://a", "tools": True, "action_field": "text"}, "action_field has no effect with tools=true"),
        ({"url": "http://a", "invalid": "{"}, "invalid must be a text with"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        OpenEnvConfig(**settings)
