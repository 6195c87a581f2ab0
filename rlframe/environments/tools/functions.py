"""A Python function as a tool: its schema comes from its type hints and its docstring."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.environments.tools.base import Schema, Tool, result_of
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A function with the arguments that it always gets and the policy does not see."""

    function: Any
    fixed: dict[str, Any]


class FunctionTool(Tool):
    """Calls a function."""

    def __init__(self, config: Bound):
        self._function, self._fixed = config.function, config.fixed
        self._schema = schema_of(config.function, fixed=config.fixed)

    @property
    def schemas(self) -> list[Schema]:
        """See Tool."""
        return [self._schema]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See Tool."""
        return as_text(await result_of(self._function, {**arguments, **self._fixed}))


def schema_of(function: Any, *, fixed: Mapping[str, Any], key: str = "environment.options.tools") -> Schema:
    """Returns the JSON schema of a function, by transformers.

    Args:
        fixed: arguments that the policy does not see.
        key: dotted config key of the function, for the error message.

    Raises:
        ConfigError: an argument has no type hint, or the docstring does not describe it.
    """
    # transformers is not imported in sessions without functions.
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            [
                Fault(
                    key,
                    said=f"{getattr(function, '__name__', function)!r} cannot be a tool: {error}",
                    hint="give every argument a type hint and a line under `Args:` of the docstring",
                )
            ]
        ) from None
    parameters = schema["function"]["parameters"]
    for name in fixed:
        parameters["properties"].pop(name, None)
    if "required" in parameters:
        parameters["required"] = [name for name in parameters["required"] if name not in fixed]
    schema["function"].pop("return", None)
    return schema


def as_text(value: Any) -> str:
    """Returns a result as the policy reads it: text as it is, everything else as JSON, or as Python writes it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
