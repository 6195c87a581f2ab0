"""The tools of a server that speaks the Model Context Protocol."""

import asyncio
import contextvars
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from rlframe.environments.tools.base import Schema, Tool, ToolError
from rlframe.types.prompt import Prompt
from rlframe.utils.bounds import PathText, Seconds, check_bounds
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

KEY = "environment.options.tools"
CLOSE_TIMEOUT_S = 10.0
ANSWERS_TIMEOUT_S = 5.0
"""Seconds in which a server that lives says so."""
MOST_PAGES = 100
"""Greatest number of pages of a list of tools."""


class Scope(StrEnum):
    """Ranges of a connection."""

    SESSION = "session"
    """Each session has its own; a server that is a command is started for each."""
    PROCESS = "process"
    """All sessions of a process share one."""


@dataclass(kw_only=True, slots=True)
class McpConfig:
    """Settings of a server, which is a command or a URL, and of the connection to it."""

    command: Annotated[list[str], PathText()] = field(default_factory=list)
    """Program and arguments of a server that speaks over its standard input and output."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the command, in addition to HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    url: str = ""
    """URL of a server that speaks over HTTP, such as http://127.0.0.1:8000/mcp."""
    connection: Scope = Scope.SESSION
    """Range of a connection. session: each session has its own, and its own server where that is a command. process:
    all sessions of a process share one, for servers that keep nothing of their callers."""
    functions: list[str] = field(default_factory=list)
    """Names of the server's tools that the policy is offered. Empty means all."""
    start_timeout_s: Seconds = 20.0
    """Seconds in which a server must start, connect and list its tools."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Disconnected(Exception):
    """Raised if there is no connection to a server."""


class Connection:
    """A connection to a server. A task of its own holds it, because the package wants it opened and closed by one."""

    def __init__(self, config: McpConfig):
        self._config = config
        self.tools: list[Any] = []
        self._client: Any = None
        self._ends = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.loop = asyncio.get_running_loop()

    @property
    def is_open(self) -> bool:
        """Returns whether it is connected, as far as is known."""
        return self._client is not None

    async def open(self) -> None:
        """Connects and lists the tools, unless it is connected.

        Raises:
            Disconnected: the server does not start, or does not answer in time.
        """
        async with self._lock:
            if self._client is not None:
                return
            await self._leave()
            self._ends = asyncio.Event()
            opened: asyncio.Future[None] = self.loop.create_future()
            # No session's task: the connection may outlive the session that opens it.
            self._task = self.loop.create_task(self._hold(opened, self._ends), context=contextvars.Context())
            waits = {opened, self._task}
            try:
                await asyncio.wait(waits, timeout=self._config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self._leave()
                raise
            if not opened.done():
                why = f"it did not answer within {self._config.start_timeout_s:g} s"
                if self._task.done() and (error := self._task.exception()):
                    why = _reason(error)
                await self._leave()
                raise Disconnected(why)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Returns the result of a tool.

        Raises:
            ToolError: the server refuses the call.
            Disconnected: the server has ended.
        """
        from mcp import MCPError

        client = self._client
        if client is None:
            raise Disconnected("there is no connection")
        try:
            return await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if await self._answers(client):
                raise ToolError(str(error)) from None
            await self._lost(client)
            raise Disconnected(str(error)) from None
        except _broken() as error:
            await self._lost(client)
            raise Disconnected(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        """Closes the connection, and ends a server that is a command."""
        async with self._lock:
            await self._leave()

    async def _answers(self, client: Any) -> bool:
        """Returns whether the server lives."""
        from mcp import MCPError
        from mcp_types import METHOD_NOT_FOUND

        try:
            async with asyncio.timeout(ANSWERS_TIMEOUT_S):
                await client.list_tools(cache_mode="bypass")
        except MCPError as error:
            return error.error.code == METHOD_NOT_FOUND
        except _broken():
            return False
        return True

    async def _lost(self, client: Any) -> None:
        async with self._lock:
            if self._client is client:
                await self._leave()

    async def _leave(self) -> None:
        """Ends the task that holds the connection."""
        is_open, self._client, task, self._task = self.is_open, None, self._task, None
        self._ends.set()
        if task is None:
            return
        if not is_open:
            task.cancel()  # It still waits for the server.
        await asyncio.wait([task], timeout=CLOSE_TIMEOUT_S)
        if task.done() and not task.cancelled():
            task.exception()  # A server that has ended ends the task with an error, which its caller knows.
        task.cancel()

    async def _hold(self, opened: asyncio.Future[None], ends: asyncio.Event) -> None:
        from mcp import Client

        async with Client(self._server()) as client:
            self.tools = await _listed(client)
            self._client = client
            opened.set_result(None)
            await ends.wait()

    def _server(self) -> Any:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        if self._config.url:
            return self._config.url
        program, *arguments = self._config.command
        server = StdioServerParameters(command=program, args=arguments, env=dict(self._config.variables))
        return stdio_client(server, errlog=sys.__stderr__ or sys.stderr)


class Mcp(Tool):
    """Offers the tools of a server. Calls are passed on as they are. A server that ends during a call is an error of
    that call; the next one starts it again, one time in a session."""

    shared: ClassVar[dict[str, Connection]] = {}
    """Connections of whole processes, by the text of their settings."""
    listed: ClassVar[dict[str, list[str]]] = {}
    """Names of the tools of each server when it was prepared, by the text of its settings."""

    @classmethod
    def prepare(cls, config: McpConfig) -> None:
        """Connects once, and lists the tools.

        Raises:
            ConfigError: the package or the server is not there, or the server has no such tools.
        """
        if bool(config.command) == bool(config.url):
            got = "both" if config.command else "neither"
            raise _refused(f"the tool mcp must have a command or a url, got {got}")
        if config.url and config.variables:
            raise _refused("variables of the tool mcp must be empty with a url: only a command gets them")
        if find_spec("mcp") is None:
            raise _refused("the tool mcp needs the package mcp: pip install 'rlframe[agents]'")
        try:
            # In a thread of its own, because this one may have an event loop.
            with ThreadPoolExecutor(1) as thread:
                names = thread.submit(asyncio.run, _names(config)).result(
                    timeout=config.start_timeout_s + 2 * CLOSE_TIMEOUT_S
                )
        except (Disconnected, TimeoutError) as error:
            server = config.url or " ".join(config.command)
            raise _refused(
                f"the MCP server {server!r:.200} cannot be used: {error}; start it by hand to see why"
            ) from None
        if unknown := [name for name in config.functions if name not in names]:
            raise _refused(
                f"the MCP server has no tool {unknown[0]!r}; functions may name {', '.join(names) or 'none'}"
            )
        cls.shared.pop(repr(config), None)
        cls.listed[repr(config)] = names

    @classmethod
    def names(cls, config: McpConfig) -> list[str]:
        """See Tool."""
        return [name for name in cls.listed[repr(config)] if _is_offered(name, config)]

    def __init__(self, config: McpConfig):
        self._config = config
        self._connection: Connection | None = None
        self._restarts = 0

    async def open(self, prompt: Prompt, *, seed: int) -> None:
        """Connects."""
        self._connection = self._of_process() if self._config.connection is Scope.PROCESS else Connection(self._config)
        await self._connection.open()

    @property
    def schemas(self) -> list[Schema]:
        """See Tool."""
        assert self._connection is not None
        return [_schema(tool) for tool in self._connection.tools if _is_offered(tool.name, self._config)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See Tool."""
        connection = self._connection
        assert connection is not None
        try:
            if not connection.is_open:
                if self._restarts:
                    raise ToolError("the server has ended, and is not started a second time")
                self._restarts += 1
                await connection.open()
            result = await connection.call(name, arguments)
        except Disconnected as error:
            raise ToolError(f"the server has ended: {error}") from None
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Closes the session's connection."""
        if self._connection is not None and self._config.connection is Scope.SESSION:
            await self._connection.close()

    def _of_process(self) -> Connection:
        found = self.shared.get(repr(self._config))
        if found is None or found.loop is not asyncio.get_running_loop():
            found = self.shared[repr(self._config)] = Connection(self._config)
        return found


def _broken() -> tuple[type[Exception], ...]:
    """Returns the errors of a client whose connection is broken."""
    import anyio

    return (OSError, RuntimeError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


async def _names(config: McpConfig) -> list[str]:
    connection = Connection(config)
    try:
        await connection.open()
        return [tool.name for tool in connection.tools]
    finally:
        await connection.close()


async def _listed(client: Any) -> list[Any]:
    """Returns all tools of a server."""
    tools, cursor = [], None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _is_offered(name: str, config: McpConfig) -> bool:
    return not config.functions or name in config.functions


def _schema(tool: Any) -> Schema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _text(result: Any) -> str:
    """Returns what the policy reads of a result: its texts, and what else there is by its kind."""
    parts = [part.text if part.type == "text" else f"({part.type} left out)" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts) or "(no output)"


def _reason(error: BaseException) -> str:
    """Returns the first error of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _refused(why: str) -> ConfigError:
    return ConfigError([Fault(KEY, said=why)])


COMPONENT, CONFIG = Mcp, McpConfig
