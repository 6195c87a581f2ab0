"""The responses API: reading of requests, and answers, whole and as events."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlframe.attempts.endpoint.asked import (
    Asked,
    Refused,
    call_of,
    choice_of,
    dict_of,
    ignored,
    limit_of,
    named,
    refuse,
    stops_of,
    text_of,
    tool_of,
    value_of,
)
from rlframe.attempts.endpoint.chat import ROLES
from rlframe.attempts.endpoint.said import Said, SaidCall
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message

UNSUPPORTED = {
    "previous_response_id": ((), "nothing is stored; send the whole conversation"),
    "conversation": ((), "nothing is stored; send the whole conversation"),
    "background": ((False,), "an answer is waited for"),
    "prompt": ((), "there are no stored prompts"),
    "top_logprobs": ((0,), "the run records logprobs itself"),
}
LOGPROBS = "message.output_text.logprobs"
"""Entry of `include` that asks for logprobs."""
KINDS = ("message", "function_call", "function_call_output", "reasoning")
"""Types of the items of the input."""
IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "seed": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "reasoning": ({},),
}
"""Parameters of sampling, which the run decides, with the values that ask for nothing."""


def read(body: Mapping[str, Any]) -> Asked:
    """Returns what a request asks.

    Raises:
        Refused: it cannot be done.
    """
    refuse(body, UNSUPPORTED)
    form = value_of(value_of(body, "text", dict, {}), "format", dict, {"type": "text"})
    if form.get("type") != "text":
        raise Refused("text.format must be text: nothing but the policy decides what is sampled", parameter="text")
    if LOGPROBS in value_of(body, "include", list, []):
        raise Refused(f"include={LOGPROBS} is not supported: the run records logprobs itself", parameter="include")
    given = value_of(body, "input", (str, list), [])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = value_of(body, "instructions", str, "")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        messages += _messages_of(item, f"input[{index}]")
    if not messages:
        raise Refused("input must be text or a list of at least one item", parameter="input")
    return Asked(
        messages=named(messages),
        tools=[] if body.get("tool_choice") == "none" else _tools_of(value_of(body, "tools", list, [])),
        max_tokens=limit_of(body, "max_output_tokens"),
        stop=stops_of(body),
        stream=value_of(body, "stream", bool, False),
        model=value_of(body, "model", str, ""),
        ignored=ignored(body, IGNORED),
    )


def _messages_of(item: Any, where: str) -> list[Message]:
    """Returns an item of the input as a message. Those of one turn of the policy are joined later.

    Raises:
        Refused: it is no message and no call.
    """
    kind = choice_of({"type": "message", **dict_of(item, where)}, "type", KINDS, where)
    if kind == "message":
        role = choice_of(item, "role", [role for role in ROLES if role != "tool"], where)
        return [{"role": ROLES[role], "content": text_of(item.get("content"), where)}]
    if kind == "function_call":
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        told = text_of(item.get("output"), where)
        return [{"role": "tool", "content": told, "tool_call_id": value_of(item, "call_id", str, "")}]
    # The policy's own reasoning stays where it was sampled.
    return []


def _tools_of(tools: list[Any]) -> list[Tool]:
    found = []
    for index, tool in enumerate(tools):
        choice_of(dict_of(tool, f"tools[{index}]"), "type", ["function"], f"tools[{index}]")
        found.append(tool_of(tool, f"tools[{index}]"))
    return found


def answer(said: Said, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the whole answer to a request."""
    status = "incomplete" if said.is_cut_off else "completed"
    return _response(said, body, status=status, output=[item for item, _ in _output(said)])


def events(said: Said, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the events of an answer: their names and their data."""
    number = -1

    def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number, **fields}

    begun = _response(said, body, status="in_progress", output=[])
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, (item, inside) in enumerate(_output(said)):
        yield event("response.output_item.added", output_index=index, item=_empty(item))
        at = {"item_id": item["id"], "output_index": index}
        for name, fields in inside:
            yield event(f"response.{name}", **at, **fields)
        yield event("response.output_item.done", output_index=index, item=item)
    last = "response.incomplete" if said.is_cut_off else "response.completed"
    yield event(last, response=answer(said, body))


Inside = list[tuple[str, dict[str, Any]]]
"""Names and data of the events between the beginning and the end of an item."""


def _output(said: Said) -> Iterator[tuple[dict[str, Any], Inside]]:
    """Yields the items of an answer, with their events."""
    if said.reasoning:
        part = {"type": "reasoning_text", "text": said.reasoning}
        yield {"id": f"rs_{said.id}", "type": "reasoning", "summary": [], "content": [part]}, []
    if said.content or not said.calls:
        yield _message(said)
    for index, call in enumerate(said.calls):
        yield _call(said, index, call)


def _message(said: Said) -> tuple[dict[str, Any], Inside]:
    part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
    item = {
        "id": f"msg_{said.id}",
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if said.is_cut_off else "completed",
        "content": [part],
    }
    inside: Inside = [
        ("content_part.added", {"content_index": 0, "part": {**part, "text": ""}}),
        ("output_text.delta", {"content_index": 0, "delta": said.content, "logprobs": []}),
        ("output_text.done", {"content_index": 0, "text": said.content, "logprobs": []}),
        ("content_part.done", {"content_index": 0, "part": part}),
    ]
    return item, inside


def _call(said: Said, index: int, call: SaidCall) -> tuple[dict[str, Any], Inside]:
    item = {
        "id": f"fc_{said.id}-{index}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
    inside: Inside = [
        ("function_call_arguments.delta", {"delta": call.arguments}),
        ("function_call_arguments.done", {"arguments": call.arguments, "name": call.name}),
    ]
    return item, inside


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an item as it is when nothing of it was sent."""
    empty = {"content": [] if "content" in item else None, "arguments": "" if "arguments" in item else None}
    return {**item, "status": "in_progress", **{name: value for name, value in empty.items() if name in item}}


def _response(said: Said, body: Mapping[str, Any], *, status: str, output: list[Any]) -> dict[str, Any]:
    is_over = status != "in_progress"
    usage = {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + said.sampled_tokens,
    }
    return {
        "id": f"resp_{said.id}",
        "object": "response",
        "created_at": said.created,
        "status": status,
        "model": said.model,
        "output": output,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_over and said.is_cut_off else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "usage": usage if is_over else None,
    }
