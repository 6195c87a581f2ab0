"""The interface of a tool: what the policy may call in an attempt. A file of this folder ends `COMPONENT, CONFIG =
Calculator, CalculatorConfig`."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from rlframe.environments.base import in_thread
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt

Schema = dict[str, Any]
"""{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}."""


class ToolError(Exception):
    """Raised by a tool to answer the policy with exactly this sentence, as an error of its call."""


class Tool(ABC):
    """Base of all tools. An object belongs to one session."""

    @classmethod
    def limit_s(cls, config: Any) -> float | None:
        """Returns the setting `timeout_s` of a tool that limits its calls itself. It must be below `call_timeout_s`, so
        that the policy reads the tool's own words."""
        return None

    @classmethod  # noqa: B027 - most tools share nothing
    def prepare(cls, config: Any) -> None:
        """Prepares what all sessions of a process share; see `Environment.prepare`."""

    @classmethod
    def names(cls, config: Any) -> Sequence[str]:
        """Returns the names of its functions as far as they are known once it is prepared."""
        if cls.open is not Tool.open:
            # Such a tool knows its functions when a session opens it.
            return []
        return [schema["function"]["name"] for schema in cls(config).schemas]

    @abstractmethod
    def __init__(self, config: Any):
        """Prepares the tool for a session."""

    def place(self) -> AbstractAsyncContextManager[Any]:
        """Returns what a call must hold. Its time begins when it does."""
        return nullcontext()

    async def open(self, prompt: Prompt, *, seed: int) -> None:  # noqa: B027 - most tools hold nothing
        """Begins the session, before the tool's schemas are read."""

    @property
    @abstractmethod
    def schemas(self) -> list[Schema]:
        """The functions that the tool offers: one, or several."""

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result of a call, as the policy reads it.

        Args:
            name: the function of `schemas` that is called.
            arguments: values by name, of any type: the policy chose them.

        Raises:
            ToolError: the call cannot be done; the sentence is for the policy. Any other error is told to the policy by
                its name and text.
        """

    async def close(self) -> None:  # noqa: B027 - most tools hold nothing
        """Releases what the tool holds."""


async def result_of(function: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the result of a function. A plain one runs in a thread, so that other sessions go on."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(in_thread, function, **arguments)


def answer_to(call: Mapping[str, Any], content: str) -> Message:
    """Returns the message that answers a call of an assistant's message."""
    message: Message = {"role": "tool", "name": call["function"]["name"], "content": content}
    return message | ({"tool_call_id": call["id"]} if isinstance(call.get("id"), str) else {})
