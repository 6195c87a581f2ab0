"""The types and defaults of settings, in words."""

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from rlframe.run.settings.source import Class, Field, Module, Unreadable, evaluate
from rlframe.utils.bounds import Range
from rlframe.utils.faults import shown

PLAIN = {"int": "int", "float": "float", "str": "str", "bool": "true or false", "Any": "anything"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a setting."""

    words: str
    values: tuple[str, ...] = ()
    """Values that can be listed."""
    members: dict[str, str] = field(default_factory=dict)
    """Docstrings of values."""
    section: Class | None = None
    """The dataclass of a section."""
    entry: Class | None = None
    """The dataclass of each entry of a section with names of one's choice."""


def kind_of(module: Module, node: ast.expr) -> Kind:
    """Returns the type that an annotation states."""
    match node:
        case ast.Constant(value=None):
            return Kind("null", ("null",))
        case ast.Constant(value=str(text)):
            return kind_of(module, ast.parse(text, mode="eval").body)
        case ast.Name():
            return _of_name(module, node.id)
        case ast.BinOp(op=ast.BitOr()):
            return _either(kind_of(module, node.left), kind_of(module, node.right))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *marks])):
            kind = kind_of(module, inner)
            bounds = [mark for mark in marks if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "Range"]
            return replace(kind, words=f"{kind.words}, {_bounds(module, bounds[0])}") if bounds else kind
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, inner])):
            kind = kind_of(module, inner)
            return Kind(f"entries by name: {kind.words}", entry=kind.section)
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            kind = kind_of(module, inner)
            return Kind("list" if kind.section else f"list of {kind.words}", members=kind.members)
    return Kind(ast.unparse(node))


def _of_name(module: Module, name: str) -> Kind:
    found = module.find(name)
    if found is None:
        return Kind(PLAIN.get(name, name), ("true", "false") if name == "bool" else ())
    home, statement = found
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        return kind_of(home, statement.value)
    assert isinstance(statement, ast.ClassDef)
    known = Class(home, statement)
    if not known.is_enum:
        return Kind("section", section=known)
    members = known.members()
    return Kind(f"one of {', '.join(members)}", tuple(members), {name: text for name, text in members.items() if text})


def _either(left: Kind, right: Kind) -> Kind:
    return Kind(
        f"{left.words} or {right.words}",
        (*left.values, *right.values),
        left.members | right.members,
        left.section or right.section,
        left.entry or right.entry,
    )


def _bounds(module: Module, call: ast.Call) -> str:
    """Returns the bounds of a `Range(...)` in words."""
    given = [evaluate(module, argument) for argument in call.args]
    named = {each.arg: evaluate(module, each.value) for each in call.keywords if each.arg}
    bound = Range(*given, **named)
    if bound.minimum is not None and bound.maximum is not None:
        words = f"{_number(bound.minimum)} to {_number(bound.maximum)}"
    else:
        low = f"at least {_number(bound.minimum)}" if bound.above is None else f"above {_number(bound.above)}"
        high = f"at most {_number(bound.maximum)}" if bound.below is None else f"below {_number(bound.below)}"
        words = f"{low}, {high}"
    return f"{words} ({bound.note})" if bound.note else words


def _number(value: float | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def default_of(declared: Field) -> str | None:
    """Returns the default as YAML writes it. None if the setting must be given, or is a section."""
    node = declared.default
    if isinstance(node, ast.Call):
        factory = next((each.value for each in node.keywords if each.arg == "default_factory"), None)
        if isinstance(factory, ast.Lambda):
            node = factory.body
        else:
            return {"dict": "{}", "list": "[]"}.get(ast.unparse(factory)) if factory else None
    if node is None:
        return None
    try:
        return _yaml(evaluate(declared.module, node))
    except Unreadable:
        return ast.unparse(node)


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return shown(value) if value != "" else "''"
