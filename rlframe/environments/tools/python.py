"""Runs Python code that the policy wrote, in a sandbox."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from rlframe.environments.tools.base import Schema, Tool, ToolError
from rlframe.environments.tools.sandbox.box import Box, Kind
from rlframe.environments.tools.sandbox.limits import DidNotStart, Ended, Limits
from rlframe.utils.bounds import PathText, Range, Seconds, check_bounds
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

LONGEST_CODE = 1 << 16
"""Greatest number of characters of code."""
FAILED = 1
"""The exit code of code that raised an error, whose traceback says so."""
MEBIBYTE = 1 << 20
HINTS = {
    Kind.BUBBLEWRAP: "install bubblewrap and allow user namespaces (user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, in a container a seccomp profile that permits unshare), or set "
    "sandbox: process, which does not protect from intent",
    Kind.PROCESS: "set interpreter to one that every user can read",
}
"""Advice where a sandbox does not work."""


@dataclass(kw_only=True, slots=True)
class PythonConfig:
    """Settings of the sandbox and its limits. What reaches one of them is ended with everything it has started, and the
    policy is told."""

    sandbox: Kind = Kind.BUBBLEWRAP
    """The way that code is shut in. bubblewrap: namespaces without network and without other files; it must be
    installed and allowed. process: a plain process with limits, which protects from mistakes but not from intent: the
    code can read and write what its user can, use the network, and end all other processes of that user, the run's too.
    Sessions of root run it as another user, who must be able to read the interpreter."""
    timeout_s: Seconds = 10.0
    """Seconds that one call may take. It must be less than `call_timeout_s` of the tools."""
    cpu_s: Annotated[int, Range(1, 86_400)] = 10
    """Greatest number of processor seconds of one process."""
    memory_mb: Annotated[int, Range(64, MEBIBYTE)] = 512
    """Greatest memory in MiB of all processes of a call with their files, and greatest address space of each."""
    processes: Annotated[int, Range(1, 4096)] = 16
    """Greatest number of processes and threads at the same time."""
    file_mb: Annotated[int, Range(1, 65_536)] = 64
    """Greatest size in MiB of all files of a call together. They lie in memory, and do not outlive the call. With
    process: greatest size of each file."""
    files: Annotated[int, Range(1, 1_000_000)] = 1000
    """Greatest number of files and folders of a call. Without effect with process."""
    output_kb: Annotated[int, Range(1, 16_384)] = 1024
    """Greatest size in KiB of what the code writes. What the policy reads of it is `max_answer_characters` of the
    tools."""
    parallel: Annotated[int, Range(1, 1024)] = 8
    """Greatest number of calls that run at the same time in each process of sessions. Further ones wait, as long as
    `environment.step_timeout_s` allows."""
    function: str = "python"
    """Name by which the policy calls it. Of two such tools, one needs another name."""
    interpreter: Annotated[str, PathText()] | None = None
    """Path of the Python interpreter. null means the one of the run, with its packages."""
    readable: Annotated[list[str], PathText()] = field(default_factory=list)
    """Further files and folders that the code can read, as absolute paths. Without effect with process."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def limits(self) -> Limits:
        """The limits of a call."""
        return Limits(
            timeout_s=self.timeout_s,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_mb * MEBIBYTE,
            processes=self.processes,
            file_bytes=self.file_mb * MEBIBYTE,
            files=self.files,
            output_bytes=self.output_kb << 10,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The part that all sessions of a process share."""

    box: Box
    free: asyncio.Semaphore


class Python(Tool):
    """Runs code in a new interpreter for each call. The answer is what it wrote, and the value of its last
    expression."""

    shared: ClassVar[dict[str, Shared]] = {}
    """By the text of the settings, because several tools may be of this kind."""

    @classmethod
    def limit_s(cls, config: PythonConfig) -> float:
        """See Tool."""
        return config.timeout_s

    @classmethod
    def prepare(cls, config: PythonConfig) -> None:
        """Runs a program in the sandbox.

        Raises:
            ConfigError: the sandbox does not work here.
        """
        try:
            box = Box(config.sandbox, config.limits, interpreter=config.interpreter, readable=config.readable)
            box.prove()
        except DidNotStart as error:
            said = (
                f"the sandbox {config.sandbox} of the tool python does not work here: {error}; {HINTS[config.sandbox]}"
            )
            raise ConfigError([Fault("environment.options.tools", said=said)]) from None
        cls.shared[repr(config)] = Shared(box=box, free=asyncio.Semaphore(config.parallel))

    def __init__(self, config: PythonConfig):
        self._shared, self._function = self.shared[repr(config)], config.function

    @property
    def schemas(self) -> list[Schema]:
        """See Tool."""
        code = {"type": "string", "description": "The code. The value of a last expression is printed."}
        return [
            {
                "type": "function",
                "function": {
                    "name": self._function,
                    "description": "Runs Python code in a new interpreter, and returns what it prints.",
                    "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
                },
            }
        ]

    def place(self) -> asyncio.Semaphore:
        """See Tool."""
        return self._shared.free

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See Tool."""
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ToolError(f"code must be text, got {code!r:.80}")
        if len(code) > LONGEST_CODE:
            raise ToolError(f"code must have at most {LONGEST_CODE} characters, got {len(code)}")
        try:
            return answer(await self._shared.box.run(code))
        except DidNotStart as error:
            raise ToolError(f"the code could not be started: {error}") from None


def answer(ended: Ended) -> str:
    """Returns what the policy reads.

    Raises:
        ToolError: a limit or a signal ended the code.
    """
    why = ended.stopped
    # Code may end with such a code by itself, as with sys.exit(-1).
    if not why and ended.exit_code - 128 in signal.valid_signals():
        why = f"was ended by {_signal(ended.exit_code - 128)}"
    if why:
        raise ToolError(f"the code {why}" + (f". Until then it wrote:\n{ended.output}" if ended.output else ""))
    output = ended.output or "(no output)"
    return output if ended.exit_code in (0, FAILED) else f"{output}\n(exit code {ended.exit_code})"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


COMPONENT, CONFIG = Python, PythonConfig
