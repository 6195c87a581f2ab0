"""Calls of agents: what they ask, in the form that the renderer takes, whichever API they use."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframe.data.records import check_values, parse_json
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message
from rlframe.utils.errors import DataError

INVALID = "invalid_request_error"
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a message that are text."""
MOST_STOPS = 16


class Refused(Exception):
    """Raised if a request is refused, with what the OpenAI API says of errors."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, parameter: str | None = None):
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    @property
    def body(self) -> dict[str, Any]:
        """The error in the API's form."""
        kind = INVALID if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One call of an agent."""

    messages: list[Message]
    """The conversation, with arguments of calls as dicts."""
    tools: list[Tool]
    max_tokens: int | None
    """Greatest number of tokens that the agent wants."""
    stop: tuple[str, ...]
    """Strings that end the response, in addition to the run's."""
    stream: bool
    """Whether the answer is sent as events."""
    model: str
    """The name that the agent calls the policy."""
    ignored: tuple[str, ...] = ()
    """Parameters by which the agent wants a response sampled otherwise than the run samples."""


def parsed(body: bytes) -> dict[str, Any]:
    """Returns the body of a request.

    Raises:
        Refused: it is no JSON object.
    """
    try:
        content = parse_json(body)
        check_values(content, "the body")
    except (ValueError, DataError) as error:
        raise Refused(f"the body of the request is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refused("the body of the request must be a JSON object")
    return content


def value_of(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Returns a parameter, or the default if it is absent or null.

    Raises:
        Refused: it has another type.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(each.__name__ for each in kinds)
        raise Refused(f"{name} must be of the type {expected}, got {value!r:.60}", parameter=name)
    return value


def choice_of(value: Mapping[str, Any], name: str, known: Iterable[str], where: str) -> str:
    """Returns a parameter that must be one of some texts.

    Raises:
        Refused: it is not.
    """
    found = value.get(name)
    if not isinstance(found, str) or found not in known:
        raise Refused(f"{where}.{name} must be one of {', '.join(known)}, got {found!r:.40}", parameter=where)
    return found


def dict_of(value: Any, where: str) -> dict[str, Any]:
    """Returns a value that must be an object.

    Raises:
        Refused: it is not.
    """
    if not isinstance(value, dict):
        raise Refused(f"{where} must be an object, got {value!r:.60}", parameter=where)
    return value


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """Returns the smallest limit of tokens among the parameters, or None.

    Raises:
        Refused: it is no number of at least 1.
    """
    limits = []
    for name in names:
        limit = value_of(body, name, int)
        if limit is not None and limit < 1:
            raise Refused(f"{name} must be at least 1, got {limit}", parameter=name)
        limits += [limit] if limit is not None else []
    return min(limits, default=None)


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the strings that end the response.

    Raises:
        Refused: they are no strings.
    """
    stop = value_of(body, "stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(each, str) and each for each in stops) or len(stops) > MOST_STOPS:
        raise Refused(f"stop must be at most {MOST_STOPS} texts that are not empty", parameter="stop")
    return tuple(stops)


def refuse(body: Mapping[str, Any], unsupported: Mapping[str, tuple[Sequence[Any], str]]) -> None:
    """Refuses parameters with values that cannot be done.

    Args:
        unsupported: by name, the values that mean nothing, besides null, and the reason for which others are refused.

    Raises:
        Refused: there is one.
    """
    for name, (harmless, why) in unsupported.items():
        value = body.get(name)
        # 1 equals True, and neither means the other here.
        if value is not None and not any(value == each and type(value) is type(each) for each in harmless):
            raise Refused(f"{name}={value!r:.60} is not supported: {why}", code="unsupported_parameter", parameter=name)


def ignored(body: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Returns the names of the parameters that have other values than those that mean nothing."""
    return tuple(name for name, values in harmless.items() if body.get(name) is not None and body[name] not in values)


def text_of(content: Any, where: str) -> str:
    """Returns the text of a message's content: text, or a list of parts.

    Raises:
        Refused: it is something else, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where}.content must be text or a list of parts, got {content!r:.60}", parameter=where)
    texts = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = choice_of(dict_of(part, place), "type", TEXT_PARTS, place)
        texts.append(value_of(part, "refusal" if kind == "refusal" else "text", str, ""))
    return "".join(texts)


def arguments_of(text: Any, where: str) -> dict[str, Any]:
    """Returns the arguments of a call, which an agent sends back as JSON text.

    Raises:
        Refused: they are none.
    """
    try:
        arguments = parse_json(text) if isinstance(text, str) and text.strip() else text or {}
        check_values(arguments, where)
    except (ValueError, DataError) as error:
        raise Refused(f"{where}.arguments must be JSON text: {error}", parameter=where) from None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}.arguments must be an object, got {text!r:.60}", parameter=where)
    return arguments


def call_of(id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Returns a call as templates take it.

    Raises:
        Refused: it is none.
    """
    if not isinstance(name, str) or not name:
        raise Refused(f"{where} must name a function, got {name!r:.60}", parameter=where)
    own = {"id": id} if isinstance(id, str) else {}
    return {**own, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments, where)}}


def tool_of(function: Any, where: str) -> Tool:
    """Returns an offered tool as templates take it. Fields that no model reads, such as `strict`, are left out.

    Raises:
        Refused: it is none.
    """
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise Refused(f"{where} must be a function with a name, got {function!r:.60}", parameter=where)
    parameters = value_of(function, "parameters", dict, {"type": "object", "properties": {}})
    told = {"name": name, "description": value_of(function, "description", str, ""), "parameters": parameters}
    return {"type": "function", "function": told}


def named(messages: Iterable[Message]) -> list[Message]:
    """Returns the messages: those of tools with the name of the function that they answer, which some templates write,
    and calls that an agent sends as messages of their own in the message of the turn that they were said in."""
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        if found and _is_more(message, found[-1]):
            calls = [*found[-1].get("tool_calls", ()), *message["tool_calls"]]
            found[-1] = {**found[-1], "tool_calls": calls}
            message, _ = found[-1], found.pop()
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        found.append(message)
    return found


def _is_more(message: Message, before: Message) -> bool:
    """Returns whether a message has nothing but further calls of the turn before it."""
    is_same_turn = message["role"] == before["role"] == "assistant"
    return is_same_turn and bool(message.get("tool_calls")) and not message["content"]
