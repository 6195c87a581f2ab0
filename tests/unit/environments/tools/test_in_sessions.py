"""Tools in the processes that sessions run in: limits of these processes hold for sandboxes and servers too."""

import asyncio
import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlframe.attempts.sessions.calls import SessionFailed, Setup, Trouble
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.environments.config import EnvironmentConfig
from tests.unit.environments.tools.test_escapes import bubblewrap as bubblewrap
from tests.unit.environments.tools.test_tools import PROMPT, called, contents
from tests.until import PATIENCE_S, until

pytestmark = pytest.mark.later

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def setup(tools: dict[str, Any], *, step_timeout_s: float = 30.0) -> Setup:
    """Settings of one process with these tools."""
    config = EnvironmentConfig(
        name="tools", options={"tools": tools}, workers=1, step_timeout_s=step_timeout_s, memory_gb=2.0
    )
    return Setup(environment=config, folder=os.getcwd(), sources={})


def test_many_sessions_call_tools_at_the_same_time(bubblewrap: None, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    pytest.importorskip("bm25s")
    (tmp_path / "a.txt").write_text("The answer is 42.")
    server = {"command": [sys.executable, SERVER], "connection": "process"}
    tools = {
        "python": {"name": "python", "options": {"timeout_s": 20.0}},
        "search": {"name": "search", "options": {"corpus": str(tmp_path)}},
        "server": {"name": "mcp", "options": server},
    }

    async def one(pool: SessionPool, number: int) -> list[str]:
        session = await pool.open(PROMPT, seed=0)
        names = [tool["function"]["name"] for tool in session.opening.tools]
        assert names[:3] == ["python", "search", "add"]
        calls = [("python", {"code": f"{number} * 2"}), ("search", {"query": "answer"}), ("add", {"a": number, "b": 1})]
        step = await session.step(called(*calls))
        await session.close()
        return contents(step)

    async def run() -> list[list[str]]:
        pool = SessionPool(setup(tools))
        try:
            return await asyncio.gather(*(one(pool, number) for number in range(8)))
        finally:
            pool.close()

    found = asyncio.run(run())
    assert found == [[f"{number * 2}\n", "[1] a\nThe answer is 42.", f"{number + 1}"] for number in range(8)]


def test_a_sandbox_ends_with_the_process_that_made_it(bubblewrap: None) -> None:
    seconds = f"60.{uuid.uuid4().int % 10**9:09}"
    # Code of a call that takes longer than a step may: the session ends first.
    code = f"import subprocess; subprocess.run(['sleep', '{seconds}'], start_new_session=True)"
    tools = {"python": {"name": "python", "options": {"timeout_s": 60.0}}}

    def left() -> list[psutil.Process]:
        every = psutil.process_iter(["cmdline"])
        return [each for each in every if seconds in (each.info["cmdline"] or ()) and each.is_running()]

    async def run(ends: str) -> None:
        pool = SessionPool(setup(tools, step_timeout_s=3.0 if ends == "step" else 30.0))
        try:
            session = await pool.open(PROMPT, seed=0)
            step = asyncio.create_task(session.step(called(("python", {"code": code}))))
            async with asyncio.timeout(PATIENCE_S):
                while not left() and not step.done():
                    await asyncio.sleep(0.05)
            assert ends == "step" or left()
            if ends == "kill":
                pool.close()
            with pytest.raises(SessionFailed) as caught:
                await step
            assert caught.value.trouble is (Trouble.DIED if ends == "kill" else Trouble.TOOK_TOO_LONG)
            until(lambda: not left(), what="the sandbox ends")
        finally:
            pool.close()

    for ends in ("kill", "step"):
        asyncio.run(run(ends))


def test_a_run_without_a_sandbox_is_told_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlframe.attempts.sessions.calls import CannotStart
    from rlframe.attempts.sessions.pool import try_start

    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("bwrap") is None
    with pytest.raises(CannotStart, match="bubblewrap is not installed; install bubblewrap"):
        try_start(setup({"python": {"name": "python"}}))
