"""The reference of all settings, as Markdown: every field of every dataclass with its docstring, type and default."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rlframe.run.config import RunConfig
from rlframe.run.load import CHOICES
from rlframe.utils import registry
from rlframe.utils.bounds import Range
from rlframe.utils.build import as_dict

PACKAGES = {section: package for section, package in CHOICES.items() if "." not in section}
"""Sections whose dataclass depends on `<section>.name`, and the packages of its names."""
OPTIONS = {
    "reward.parts.PART.options": "rlframe.rewards",
    "environment.options": "rlframe.environments",
    "environment.options.tools.TOOL.options": "rlframe.environments.tools",
}
"""Free sections whose fields are those of the settings that a name chooses."""
HEAD = """# Settings

Every setting of a run, generated from the dataclasses. Set one on the command line, `key=value`, or in a YAML file of
`configs/`. A number states its range. A setting without a default must be given.
"""


def page() -> str:
    """Returns the page."""
    seen: dict[type, str] = {}
    parts = [HEAD, *section(RunConfig, "", title="## The run", seen=seen)]
    for place, package in PACKAGES.items():
        parts += chosen(package, place, seen, of=f"`{place}.name`")
    for place, package in OPTIONS.items():
        parts += chosen(package, place, seen, of=f"`{place.removesuffix('.options')}.name`")
    return "\n".join(parts) + "\n"


def section(kind: type, key: str, *, title: str, seen: dict[type, str]) -> Iterator[str]:
    """Yields the lines of a dataclass and of those inside it.

    Args:
        key: dotted key of the section, empty for the run itself.
        title: its heading, which names the level too.
        seen: where the dataclasses so far were described, by their key.
    """
    hints, prefix = get_type_hints(kind, include_extras=True), f"{key}." if key else ""
    inside = {field.name: found for field in fields(kind) if (found := nested(hints[field.name]))}
    new = {name: found for name, found in inside.items() if found not in seen and f"{prefix}{name}" not in PACKAGES}
    seen |= {found: f"{prefix}{name}" for name, found in new.items()}
    yield f"\n{title}\n"
    if key and kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
        yield one_line(kind.__doc__) + "\n"
    yield "| setting | type | default | |\n|---|---|---|---|"
    for field in fields(kind):
        if f"{prefix}{field.name}" in PACKAGES:
            continue
        text = docs_of(kind).get(field.name, "")
        if field.name in inside:
            text += f" Its settings are those of `{seen[inside[field.name]]}`." if field.name not in new else ""
        yield f"| `{prefix}{field.name}` | {type_of(hints[field.name])} | {default_of(field)} | {cell(text)} |"
    level = "##" if not key else "###" if title.startswith("## ") else "####"
    for name, found in new.items():
        yield from section(found, f"{prefix}{name}", title=f"{level} `{prefix}{name}`", seen=seen)


def chosen(package: str, place: str, seen: dict[type, str], *, of: str) -> Iterator[str]:
    """Yields the settings of every component of a package."""
    yield f"\n## `{place}`\n\nThe settings depend on {of}."
    for name in registry.names(package):
        # The package of the tools is an environment itself.
        kind = None if package.endswith(f".{name}") else registry.find(package, name, key=place)[1]
        if kind and fields(kind):
            yield from section(kind, place, title=f"### `{name}`", seen=seen)


def nested(hint: Any) -> type | None:
    """Returns the dataclass that a field of this type holds, if it holds one."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and is_dataclass(option):
            return option
    return None


def type_of(hint: Any) -> str:
    """Returns a type in words: the choices of an enum, the range of a number."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        found = [note for note in notes if isinstance(note, Range)]
        return type_of(inner) + (f", {range_of(found[0])}" if found else "")
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return " / ".join(f"`{each.value}`" for each in hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return "section"
    if options := [each for each in get_args(hint) if each is not type(None)]:
        origin = get_origin(hint)
        inner = ", ".join(type_of(each) for each in options)
        return f"{origin.__name__} of {inner}" if isinstance(origin, type) and origin in (list, dict, tuple) else inner
    return "any" if hint is Any else getattr(hint, "__name__", str(hint))


def range_of(bound: Range) -> str:
    """Returns a range as an interval."""
    low = f"[{bound.minimum}" if bound.minimum is not None else f"({bound.above}"
    high = f"{bound.maximum}]" if bound.maximum is not None else f"{bound.below})"
    return f"{low}, {high}"


def default_of(field: Field[Any]) -> str:
    """Returns a default as YAML, or a dash."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "-"
    plain = as_dict(value)
    if isinstance(plain, dict) and plain:
        return ""
    written = {None: "null", True: "true", False: "false"}.get(plain) if isinstance(plain, bool | None) else None
    return f"`{written if written is not None else plain if plain != '' else chr(39) * 2}`"


@cache
def docs_of(kind: type) -> dict[str, str]:
    """Returns the docstrings of a dataclass's fields, those that it inherits included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        body = ast.parse(inspect.cleandoc(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[statement.target.id] = one_line(str(after.value.value))
    return found


def one_line(text: str) -> str:
    """Returns a docstring as one line."""
    return " ".join(text.split())


def cell(text: str) -> str:
    """Returns a text for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
