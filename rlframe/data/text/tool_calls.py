"""Tools and calls of them, in the form that chat templates take.

| shape | the field `tools` of the record | a call |
|---|---|---|
| chat | [{type: function, function: {name, ...}}] | `tool_calls` of a message: [{id, function: {name, arguments}}] |
| sharegpt | [{name, ...}], or that as JSON text | a turn from function_call: {name, arguments} as JSON text |

Arguments may be JSON text; templates get them as a dict, which most of them write as JSON. A file with columns
(Parquet, datasets of the hub) gives every tool and call the names of all others, with null; these are left out, as in
TRL. JSON text keeps its own nulls.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.data.records import Record, check_values, parse_json
from rlframe.utils.errors import DataError

Tool = dict[str, Any]
"""{"type": "function", "function": {"name": ..., ...}}, what chat templates take."""
NONE = (None, "", "[]", [], {})
"""Values of a field that count as absent."""


def tools_of(record: Record) -> tuple[Tool, ...]:
    """Returns the tools that the record offers.

    Raises:
        DataError: a value is not a tool; the message names the record and the value.
    """
    value = record.fields.get("tools")
    if value in NONE:
        return ()
    listed = _parsed(record, "tools", value)
    if not isinstance(listed, list):
        raise DataError(f"{record.where}: expected 'tools' to be a list, found {value!r:.60}")
    return tuple(
        {"type": "function", "function": _function(record, f"tools[{index}]", tool)}
        for index, tool in enumerate(listed)
    )


def calls_of(record: Record, name: str, value: Any) -> list[dict[str, Any]]:
    """Returns the calls in the field `name`: a list of them, one by itself, or either as JSON text.

    Raises:
        DataError: a value is not a call; the message names the record and the value.
    """
    listed = _parsed(record, name, value)
    calls = []
    for index, call in enumerate(listed if isinstance(listed, list) else [listed]):
        function = _function(record, f"{name}[{index}]", call)
        arguments = _parsed(record, f"{name}[{index}].arguments", function.get("arguments", {}))
        if not isinstance(arguments, dict):
            raise DataError(
                f"{record.where}: expected {name}[{index}].arguments to name each argument, found {arguments!r:.60}"
            )
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**own, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def names_in(tools: Sequence[Tool], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names that a template has to write: of each tool, and of each call."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return [one["function"]["name"] for one in (*tools, *calls)]


def with_arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for call in message["tool_calls"]
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls}


def _function(record: Record, name: str, value: Any) -> dict[str, Any]:
    """Returns what is in `function`, or the value itself."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{record.where}: expected {name} to be a function with a name, found {value!r:.80}")
    return function


def _parsed(record: Record, name: str, value: Any) -> Any:
    """Returns JSON text as what it says; anything else as it is, but for nulls of columns."""
    if not isinstance(value, str):
        return _without_nulls(value) if record.has_columns else value
    try:
        parsed = parse_json(value)
    except ValueError as error:
        raise DataError(f"{record.where}: expected {name} to be JSON, found {value!r:.60} ({error})") from error
    check_values(parsed, record.where)
    return parsed


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
