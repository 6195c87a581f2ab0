"""The tools that a configuration names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rlframe.environments.tools.base import Tool
from rlframe.environments.tools.functions import Bound, FunctionTool, schema_of
from rlframe.utils import outside, registry
from rlframe.utils.bounds import PathText
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

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
        return FunctionTool, Bound(function=found, fixed=term.options)
    component, config = registry.find("rlframe.environments.tools", term.name, key=f"{key}.name")
    return component, build(config, term.options, key=f"{key}.options")
