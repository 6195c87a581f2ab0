"""Replies: what the policy sampled, as a message in the form of the OpenAI API, and calls that are none."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframe.data.records import check_values
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message
from rlframe.utils.errors import DataError

ID_DIGITS = 9
"""Length of a call's id. Mistral's templates take no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Malformed:
    """A call that cannot be made."""

    text: str
    """The call as the policy wrote it."""
    why: str
    """A sentence that says what is wrong, which an environment can show to the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A turn of the policy.

    Example: `Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>` is the message {role: assistant,
    content: "Let me see.", tool_calls: [{id: "5f0c1a2b3", type: function, function: {name: add, arguments: {a: 1}}}]}.
    """

    message: Message
    """{role, content}, with `reasoning_content` and `tool_calls` if there are any. Malformed calls stay in the
    content."""
    malformed: tuple[Malformed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call as a form of tool calls reads it, before it is compared with the tools."""

    text: str
    """The call as the policy wrote it."""
    name: Any = None
    arguments: Any = None
    id: Any = None
    """Id of the call, if the form has ids."""
    fault: str = ""
    """The reason why the call cannot be read. Empty if it can."""


Part = str | Call
"""A stretch of a turn: text, or a call."""


def fault_of(call: Call, tools: Mapping[str, Tool]) -> str:
    """Returns a sentence that says why the call cannot be made, or an empty text.

    Args:
        tools: the offered tools by name.
    """
    if call.fault:
        return call.fault
    if not isinstance(call.name, str) or not call.name:
        return "the call has no name"
    if call.name not in tools:
        return f"there is no tool {call.name!r:.80}; there are: {', '.join(tools) or 'none'}"
    if not isinstance(call.arguments, dict):
        return f"the arguments of {call.name} must be an object that names each of them"
    required = schema_of(tools[call.name]).get("required")
    absent = [name for name in required if name not in call.arguments] if isinstance(required, list) else []
    if absent:
        return f"{call.name} needs the argument {absent[0]!r:.80}"
    try:
        check_values([call.name, call.arguments], "the arguments")
    except DataError as error:
        return str(error)
    return ""


def schemas_of(tool: Tool) -> Mapping[str, Any]:
    """Returns the JSON schema of each argument that the tool describes."""
    properties = schema_of(tool).get("properties")
    return properties if isinstance(properties, dict) else {}


def id_of(token_ids: Sequence[int], index: int) -> str:
    """Returns an id for the call number `index` of a turn, always the same one for the same tokens."""
    digest = hashlib.blake2b(",".join(map(str, token_ids)).encode(), digest_size=8, salt=index.to_bytes(8, "little"))
    return digest.hexdigest()[:ID_DIGITS]


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """Returns the JSON schema of all arguments together."""
    schema = tool["function"].get("parameters")
    return schema if isinstance(schema, dict) else {}
