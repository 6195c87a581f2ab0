"""Tools of MCP servers, over a real one: what is offered, passed on, and done when it ends."""

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlframe.environments.base import Step, find_environment
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.tools.mcp import Mcp, McpConfig
from rlframe.utils.errors import ConfigError
from tests.unit.environments.tools.test_tools import PROMPT, called, contents, session
from tests.until import under_a_fair_limit, until

pytestmark = pytest.mark.later

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = [sys.executable, SERVER]
NAMES = ["add", "count", "fail", "wait", "draw", "table", "die"]


def over(**options: Any) -> dict[str, Any]:
    """The tools of a server."""
    return {"server": {"name": "mcp", "options": options}}


def begun(port: int) -> "subprocess.Popen[bytes]":
    """A server over HTTP that answers."""
    server = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        assert server.poll() is None, "the server has ended"
        with closing(socket.socket()) as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    until(listens, every_s=0.1)
    return server


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    server = begun(number)
    yield number
    server.kill()
    server.wait()


@pytest.mark.parametrize("by", ["command", "url"])
def test_tools_of_a_server_are_offered_and_answer(by: str, port: int) -> None:
    options = {"command": COMMAND} if by == "command" else {"url": f"http://127.0.0.1:{port}/mcp"}
    turn = called(("add", {"a": 2, "b": 40}), ("fail", {}), ("draw", {}), ("table", {}), ("add", {"a": "x"}))
    offered, (step,) = session([turn], tools=over(**options))
    assert offered == NAMES
    added, failed, drawn, table, wrong = contents(step)
    assert added == "42"
    assert failed.startswith("Error: Error executing tool fail")
    assert drawn == "(image left out)"
    assert '"a"' in table
    assert wrong.startswith("Error: ") and "valid integer" in wrong
    assert step.metrics["failed_tool_calls"] == 2


def test_schemas_are_the_servers() -> None:
    kind, settings = find_environment(EnvironmentConfig(name="tools", options={"tools": over(command=COMMAND)}))

    async def run() -> Any:
        kind.prepare(settings)
        made = kind(settings)
        await made.reset(PROMPT, seed=0)
        await made.close()
        return made.tools[0]

    schema = asyncio.run(run())
    assert schema["type"] == "function" and schema["function"]["name"] == "add"
    assert schema["function"]["description"].startswith("Adds two numbers.")
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    assert schema["function"]["parameters"]["required"] == ["a", "b"]


def test_some_of_the_tools_can_be_chosen() -> None:
    offered, (step,) = session([called(("die", {}))], tools=over(command=COMMAND, functions=["add"]))
    assert offered == ["add"]
    assert contents(step) == ["Error: there is no tool 'die'"]
    config = McpConfig(command=COMMAND, functions=["added"])
    with pytest.raises(ConfigError, match="has no tool 'added'; functions may name add, count"):
        Mcp.prepare(config)


def test_a_function_that_another_tool_has_is_refused_before_a_session(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def add() -> int:\n    """Adds."""\n    return 1\n')
    mine = {"mine": {"name": f"{tmp_path}/mine.py:add"}}

    def prepared(**options: Any) -> None:
        tools = mine | over(command=COMMAND, **options)
        kind, settings = find_environment(EnvironmentConfig(name="tools", options={"tools": tools}))
        kind.prepare(settings)

    with pytest.raises(ConfigError, match="tools.server: offers the function 'add', as mine does; .*options.functions"):
        prepared()
    prepared(functions=["count"])


def sessions(scope: str) -> list[str]:
    """What two sessions count on a server, one after the other."""

    async def run() -> list[str]:
        options = {"tools": over(command=COMMAND, connection=scope)}
        kind, settings = find_environment(EnvironmentConfig(name="tools", options=options))
        kind.prepare(settings)
        answers = []
        for _ in range(2):
            made = kind(settings)
            await made.reset(PROMPT, seed=0)
            answers += contents(await made.step(called(("count", {}))))
            await made.close()
        for connection in Mcp.shared.values():
            await connection.close()
        Mcp.shared.clear()
        return answers

    return asyncio.run(run())


def test_a_connection_is_the_sessions_or_the_processes() -> None:
    assert sessions("session") == ["1", "1"]
    assert sessions("process") == ["1", "2"]


def answers_of(steps: list[Step]) -> list[str]:
    return [content for step in steps for content in contents(step)]


def test_a_server_that_ends_is_an_error_of_the_call_and_is_started_again_once() -> None:
    turns = [called((name, {})) for name in ("count", "die", "count", "die", "count")]
    _, steps = session(turns, tools=over(command=COMMAND))
    first, died, again, died_again, never = answers_of(steps)
    assert (first, again) == ("1", "1")
    assert died.startswith("Error: the server has ended") and died_again.startswith("Error: the server has ended")
    assert never == "Error: the server has ended, and is not started a second time"


def test_a_server_over_http_that_comes_back_is_used_again() -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]

    async def run() -> list[str]:
        options = {"tools": over(url=f"http://127.0.0.1:{number}/mcp")}
        kind, settings = find_environment(EnvironmentConfig(name="tools", options=options))
        server = begun(number)
        try:
            kind.prepare(settings)
            made = kind(settings)
            await made.reset(PROMPT, seed=0)
            steps = [await made.step(called(("count", {})))]
            server.kill()
            server.wait()
            steps.append(await made.step(called(("count", {}))))
            server = begun(number)
            steps.append(await made.step(called(("count", {}))))
            await made.close()
        finally:
            server.kill()
            server.wait()
        return answers_of(steps)

    before, ended, after = asyncio.run(run())
    assert (before, after) == ("1", "1")
    assert ended.startswith("Error: the server has ended")


def test_a_call_that_takes_too_long_leaves_the_connection_as_it_is() -> None:
    turns = [called(("wait", {"seconds": 6000})), called(("count", {}))]

    def answers(limit_s: float) -> list[str]:
        return answers_of(session(turns, tools=over(command=COMMAND), call_timeout_s=limit_s)[1])

    late, counted = under_a_fair_limit(answers, lambda found: found[1] == "1", first_s=3.0)
    assert re.fullmatch(r"Error: took longer than 3(00?)? s", late) and counted == "1"


def test_a_server_that_cannot_be_used_is_refused() -> None:
    for options, said in (
        ({"command": ["/nothing/here"]}, "'/nothing/here' cannot be used: FileNotFoundError"),
        ({"command": ["/bin/false"]}, "'/bin/false' cannot be used"),
        ({"command": ["sleep", "60"], "start_timeout_s": 1.0}, "it did not answer within 1 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "'http://127.0.0.1:9/mcp' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=said):
            Mcp.prepare(McpConfig(**options))
    for options, said in (
        ({}, "must have a command or a url, got neither"),
        ({"command": ["a"], "url": "b"}, "must have a command or a url, got both"),
        ({"url": "b", "variables": {"a": "b"}}, "must be empty with a url"),
    ):
        with pytest.raises(ConfigError, match=said):
            Mcp.prepare(McpConfig(**options))
