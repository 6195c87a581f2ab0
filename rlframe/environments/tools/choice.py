"""The tools that a configuration names."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rlframe.environments.tools.base import Tool
from rlframe.environments.tools.functions import Bound, FunctionTool, schema_of
from rlframe.utils import outside, registry
from rlframe.utils.bounds import PathText
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

KEY = "environment.options.tools"


@dataclass(kw_only=True, slots=True)
class ToolTerm:
    """One tool."""

    name: Annotated[str, PathText()]
    """A file of rlframe/environments/tools, or a function or Tool class of one's own: `path/to/file.py:function` or
    `package.module:Class`. A function needs a type hint and a line of its docstring for every argument."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the tool: the fields of its config class. Of a function: arguments that the policy does not see."""


def build_tools(terms: Mapping[str, ToolTerm]) -> list[tuple[type[Tool], Any]]:
    """Returns class and settings of each tool.

    Raises:
        ConfigError: a tool does not exist, has no such option, or cannot be described.
    """
    if not terms:
        raise ConfigError([Fault(KEY, "must name at least one tool", got="none")])
    return [built(term, f"{KEY}.{name}") for name, term in terms.items()]


def built(term: ToolTerm, key: str) -> tuple[type[Tool], Any]:
    """Returns class and settings of a tool. Raises ConfigError as `build_tools`."""
    if outside.is_outside(term.name) and not isinstance(found := outside.load(term.name, key=f"{key}.name"), type):
        if not callable(found):
            raise ConfigError([Fault(f"{key}.name", "must name a function or a Tool class", got=repr(term.name))])
        schema_of(found, fixed=term.options, key=f"{key}.name")
        if faults := list(_option_faults(found, term.options, f"{key}.options")):
            raise ConfigError(faults)
        return FunctionTool, Bound(function=found, fixed=term.options)
    component, config = registry.find("rlframe.environments.tools", term.name, key=f"{key}.name")
    return component, build(config, term.options, key=f"{key}.options")


def _option_faults(function: Any, options: Mapping[str, Any], key: str) -> Iterator[Fault]:
    """Yields a fault for each option that is no argument of a function: every call of the policy would fail."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for name in options:
        if name not in parameters:
            near = did_you_mean(name, parameters)
            yield Fault(f"{key}.{name}", f"must be one of {', '.join(parameters) or 'none'}", hint=near)
