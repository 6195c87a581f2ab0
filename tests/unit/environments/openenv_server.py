"""Two servers of openenv-core: an action is a number to add, until 10; actions are calls of tools."""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Add(Action):
    number: int


class Total(Observation):
    total: int
    hint: str = ""


class Count(Environment):
    """Adds up to 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: int = 0, **kwargs: Any) -> Total:
        self.total = start
        return Total(total=start, hint=f"seed {seed}")

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        self.total += action.number
        return Total(total=self.total, hint="more", done=self.total >= 10, reward=float(self.total == 10))

    @property
    def state(self) -> State:
        return self._state


class Notes(MCPEnvironment):
    """Keeps texts."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("notes")
        kept: list[str] = []

        @server.tool
        def note(text: str) -> str:
            """Keeps a text."""
            if not text:
                raise ValueError("nothing to keep")
            kept.append(text)
            return f"{len(kept)} notes"

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("tools only")

    @property
    def state(self) -> State:
        return self._state


async def serve(port_file: str) -> None:
    """Serves both, and writes their ports."""
    apps = (
        create_fastapi_app(Count, Add, Total, max_concurrent_envs=8),
        create_fastapi_app(Notes, CallToolAction, CallToolObservation, max_concurrent_envs=8),
    )
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in apps]
    Path(port_file).write_text("".join(f"{door.getsockname()[1]}\n" for door in doors))
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="warning")) for app in apps]
    await asyncio.gather(*(server.serve(sockets=[door]) for server, door in zip(servers, doors, strict=True)))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
