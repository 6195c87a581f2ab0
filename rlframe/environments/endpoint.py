"""Agents as they are: programs and functions that ask the policy through the OpenAI API."""

import asyncio
import inspect
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from rlframe.environments.base import Agent, Endpoint, Step
from rlframe.environments.config import EnvironmentConfig
from rlframe.types.prompt import Prompt
from rlframe.utils import outside
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import ConfigError, SettingError
from rlframe.utils.faults import Fault

KEPT_BYTES = 1 << 12
"""Number of the last bytes that a command prints of which a message shows the last line."""
READ_S = 2.0
"""Seconds after a command's end in which what it has printed is read."""
SHOWN = 200
"""Greatest number of characters of that line."""
LARGEST_OUTCOME_BYTES = 1 << 20
"""Greatest size of the file in which a command says how its attempt went."""
COMMANDS = 64
"""Greatest number of commands that run at the same time if nothing else is said."""
COMMANDS_PER_CORE = 4
"""The same for each core: a command is mostly waiting for engines, but its start is work."""
TASK = "{task}"
"""Stands in a command for the text of the prompt's last user message."""


class AgentFailed(Exception):
    """Raised if a command does not end as it should."""


@dataclass(kw_only=True, slots=True)
class EndpointConfig:
    """Settings of an agent: either a command or a function."""

    command: list[str] = field(default_factory=list)
    """A program and its arguments, started once for each attempt in the run's working folder. `{task}` in an argument
    stands for the text of the prompt's last user message. It gets the variables OPENAI_BASE_URL, OPENAI_API_KEY,
    RLFRAME_MODEL, RLFRAME_SEED, RLFRAME_PROMPT, the path of a JSON file with the prompt, and RLFRAME_OUTCOME, the path
    of a JSON file that it may write: `{"reward": 1.0, "metrics": {"tries": 2}, "verdict": "train"}`, each optional. An
    exit code other than 0 means that it has failed."""
    function: str | None = None
    """A function, `path/to/file.py:name` or `package.module:name`, called as `name(prompt, endpoint, **options)` for
    each attempt. It returns None, a reward, a dict with `reward`, `metrics` and `verdict`, each optional, or a Step. A
    coroutine function runs in the event loop that sessions share, a plain one in a thread."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, by name."""
    parallel: Annotated[int, Range(1, 1_000_000)] | None = None
    """Greatest number of attempts whose agents run at the same time. Further ones wait, which counts against
    rollout.attempt_timeout_s. null means four for each core and at most 64 for a command, each of which is a
    process, and no limit for a function."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if bool(self.command) == (self.function is not None):
            got = "both" if self.command else "neither"
            raise SettingError("command", "or function must be given, and not both of them", got=got)
        if self.options and self.function is None:
            raise SettingError("options", "has no effect without function", got=sorted(self.options), hint="remove it")


class EndpointAgent(Agent):
    """Runs a command or a function that asks the policy at the attempt's endpoint."""

    rewards: ClassVar[bool] = True
    function: ClassVar[Any] = None

    @classmethod
    def faults(cls, config: EndpointConfig, sessions: EnvironmentConfig) -> Iterator[Fault]:
        """Yields a fault if the package that serves HTTP is missing."""
        if find_spec("aiohttp") is None:
            yield Fault(
                "environment.name", "needs the package aiohttp", got="endpoint", hint="pip install 'rlframe[agents]'"
            )

    @classmethod
    def most_at_once(cls, config: EndpointConfig) -> int | None:
        """See Agent."""
        if config.parallel is None and config.command:
            return min(COMMANDS, COMMANDS_PER_CORE * len(os.sched_getaffinity(0)))
        return config.parallel

    @classmethod
    def prepare(cls, config: EndpointConfig) -> None:
        """Finds the function, or the command's program."""
        if config.function is not None:
            cls.function = staticmethod(outside.load(config.function, key="environment.options.function"))
        elif shutil.which(config.command[0]) is None:
            rule = "must begin with a program that can be run"
            raise ConfigError([Fault("environment.options.command", rule, got=repr(config.command[0]))])

    def __init__(self, config: EndpointConfig):
        self._config = config
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def run(self, endpoint: Endpoint) -> Step:
        """See Agent."""
        host = urlsplit(endpoint.url).hostname or ""
        if self._config.function is None:
            return outcome_of(await self._command(endpoint, host))
        # Clients of HTTP would otherwise ask a proxy for an address of this machine.
        os.environ.update(without_proxy(os.environ, host))
        arguments = {"prompt": self.prompt, "endpoint": endpoint, **self._config.options}
        if inspect.iscoroutinefunction(self.function):
            return outcome_of(await self.function(**arguments))
        return outcome_of(await in_thread(partial(self.function, **arguments)))

    async def close(self) -> None:
        """Removes the command's files."""
        if self._folder is not None:
            self._folder.cleanup()

    async def _command(self, endpoint: Endpoint, host: str) -> Any:
        """Runs the command. Returns what it has written to its outcome."""
        self._folder = tempfile.TemporaryDirectory(prefix="rlframe-agent-", ignore_cleanup_errors=True)
        prompt, outcome = Path(self._folder.name) / "prompt.json", Path(self._folder.name) / "outcome.json"
        prompt.write_text(json.dumps(described(self.prompt), default=str))
        variables = {
            "OPENAI_BASE_URL": endpoint.url,
            "OPENAI_API_KEY": endpoint.key,
            "RLFRAME_MODEL": endpoint.model,
            "RLFRAME_SEED": str(endpoint.seed),
            "RLFRAME_PROMPT": str(prompt),
            "RLFRAME_OUTCOME": str(outcome),
        }
        task = task_of(self.prompt)
        process = await asyncio.create_subprocess_exec(
            *(word.replace(TASK, task) for word in self._config.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | without_proxy(os.environ, host) | variables,
            # A group of its own, which ends with the attempt, in the session of this process, which ends with it.
            process_group=0,
        )
        printed = bytearray()
        try:
            assert process.stdout is not None
            reading = asyncio.get_running_loop().create_task(keep_end(process.stdout, printed))
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        # Something that has left the group may hold the pipe open.
        await asyncio.wait([reading], timeout=READ_S)
        if code:
            last = printed.decode("utf-8", errors="replace").strip().splitlines()[-1:]
            said = f"; it printed last: {last[0][:SHOWN]}" if last else ""
            raise AgentFailed(f"the command ended with exit code {code}{said}")
        if not outcome.exists():
            return None
        with outcome.open("rb") as file:
            return json.loads(file.read(LARGEST_OUTCOME_BYTES))


async def in_thread(function: Callable[[], Any]) -> Any:
    """Returns what a function returns, in a thread of its own: those that sessions share would be taken for as long as
    agents run."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_exception(error) if error else ended.set_result(value)

    def run() -> None:
        value = error = None
        try:
            value = function()
        except BaseException as raised:  # Whatever users' code raises, SystemExit too, is the end of this agent.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=copy_context().run, args=(run,), name="agent", daemon=True).start()
    return await ended


async def keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Reads a stream to its end, and keeps its last bytes."""
    while read := await stream.read(1 << 16):
        kept += read
        del kept[:-KEPT_BYTES]


def outcome_of(value: Any) -> Step:
    """Returns what an agent says of its attempt as the step that ends it.

    Raises:
        TypeError, ValueError: it is no reward and no outcome.
    """
    if isinstance(value, Step):
        return replace(value, done=True)
    if value is None:
        return Step(done=True)
    if not isinstance(value, Mapping):
        return Step(done=True, reward=value)
    if unknown := sorted(map(str, set(value) - {"reward", "metrics", "verdict"})):
        raise ValueError(f"an outcome must have reward, metrics or verdict, got also {', '.join(unknown):.80}")
    return Step(done=True, **value)


def task_of(prompt: Prompt) -> str:
    """Returns the text of the last user message."""
    return next((each["content"] for each in reversed(prompt.messages) if each["role"] == "user"), prompt.text)


def described(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt without its tokens, as JSON takes it."""
    names = ("id", "messages", "tools", "text", "answer", "source", "fields")
    return {name: getattr(prompt, name) for name in names}


def without_proxy(variables: Mapping[str, str], host: str) -> dict[str, str]:
    """Returns the variables with which clients ask `host` itself and no proxy."""
    known = variables.get("NO_PROXY", variables.get("no_proxy", ""))
    hosts = [each for each in known.split(",") if each]
    joined = ",".join(hosts if host in hosts else [*hosts, host])
    return {"NO_PROXY": joined, "no_proxy": joined}


COMPONENT, CONFIG = EndpointAgent, EndpointConfig
