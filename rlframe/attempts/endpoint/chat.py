"""Chat completions: reading of requests, and answers, whole and as events."""

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
from rlframe.attempts.endpoint.said import Said
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
UNSUPPORTED = {
    "n": ((1,), "ask several times; calls at the same time are answered at the same time"),
    "logprobs": ((False,), "the run records them itself"),
    "top_logprobs": ((0,), "the run records logprobs itself"),
    "response_format": (({"type": "text"},), "nothing but the policy decides what is sampled"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "audio": ((), "the policy writes text"),
    "modalities": ((["text"],), "the policy writes text"),
    # What other servers take besides, which clients send as `extra_body`.
    "best_of": ((1,), "the run samples, and takes what was sampled"),
    "prompt_logprobs": ((0,), "the run records logprobs itself"),
    "continue_final_message": ((False,), "it is the policy's turn"),
    "add_generation_prompt": ((True,), "it is the policy's turn"),
    "echo": ((False,), "the answer is what the policy says"),
    "chat_template": ((), "the run's template writes conversations"),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
        + ("regex", "ebnf", "json_schema"),
        ((), "nothing but the policy decides what is sampled"),
    ),
}
IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "min_p": (),
    "seed": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "chat_template_kwargs": ({},),
}
"""Parameters of sampling, which the run decides, with the values that ask for nothing."""


def read(body: Mapping[str, Any]) -> Asked:
    """Returns what a request asks.

    Raises:
        Refused: it cannot be done.
    """
    refuse(body, UNSUPPORTED)
    value_of(body, "stream_options", dict)
    messages = value_of(body, "messages", list, [])
    if not messages:
        raise Refused("messages must be a list of at least one message", parameter="messages")
    return Asked(
        messages=named(message_of(message, f"messages[{index}]") for index, message in enumerate(messages)),
        tools=[] if body.get("tool_choice") == "none" else tools_of(value_of(body, "tools", list, [])),
        max_tokens=limit_of(body, "max_tokens", "max_completion_tokens"),
        stop=stops_of(body),
        stream=value_of(body, "stream", bool, False),
        model=value_of(body, "model", str, ""),
        ignored=ignored(body, IGNORED),
    )


def message_of(message: Any, where: str) -> Message:
    """Returns a message as templates take it.

    Raises:
        Refused: it is none.
    """
    role = choice_of(dict_of(message, where), "role", ROLES, where)
    found: Message = {"role": ROLES[role], "content": text_of(message.get("content"), where)}
    if role == "tool":
        found["tool_call_id"] = value_of(message, "tool_call_id", str, "")
    if role != "assistant":
        return found
    if reasoning := value_of(message, "reasoning_content", str) or value_of(message, "reasoning", str):
        found["reasoning_content"] = reasoning
    calls = []
    for index, call in enumerate(value_of(message, "tool_calls", list, [])):
        place = f"{where}.tool_calls[{index}]"
        function = dict_of(dict_of(call, place).get("function"), f"{place}.function")
        calls.append(call_of(call.get("id"), function.get("name"), function.get("arguments"), place))
    return {**found, "tool_calls": calls} if calls else found


def tools_of(tools: list[Any]) -> list[Tool]:
    """Returns the offered tools as templates take them.

    Raises:
        Refused: one is no function.
    """
    found = []
    for index, tool in enumerate(tools):
        choice_of(dict_of(tool, f"tools[{index}]"), "type", ["function"], f"tools[{index}]")
        found.append(tool_of(tool.get("function"), f"tools[{index}].function"))
    return found


def answer(said: Said, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the whole answer to a request."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content or None, "refusal": None}
    if not said.calls:
        message["content"] = said.content
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [_call(call) for call in said.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": said.finish_reason}
    return {**_head(said, "chat.completion"), "choices": [choice], "usage": _usage(said)}


def events(said: Said, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields the events of an answer: their names, which chat completions do not have, and their data."""
    head = _head(said, "chat.completion.chunk")
    options = value_of(body, "stream_options", dict, {})
    # With it every event has the field, and only the last one a value.
    no_usage = {"usage": None} if options.get("include_usage") else {}

    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> tuple[str, dict[str, Any]]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return "", {**head, "choices": [choice], **no_usage}

    yield chunk({"role": "assistant", "content": ""})
    if said.reasoning:
        yield chunk({"reasoning_content": said.reasoning})
    if said.content:
        yield chunk({"content": said.content})
    for index, call in enumerate(said.calls):
        whole = _call(call)
        begun = {**whole["function"], "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, **whole, "function": begun}]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    yield chunk({}, said.finish_reason)
    if no_usage:
        yield "", {**head, "choices": [], "usage": _usage(said)}
    yield "", "[DONE]"


def _call(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(said: Said, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.id}", "object": kind, "created": said.created, "model": said.model}


def _usage(said: Said) -> dict[str, int]:
    return {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.sampled_tokens,
        "total_tokens": said.prompt_tokens + said.sampled_tokens,
    }
