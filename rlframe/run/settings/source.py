"""Dataclasses of settings as their source declares them. The source is read, not imported: docstrings of fields exist
only there, and algorithms and engines would import torch."""

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "rlframe"
FOLDER = Path(__file__).parents[3]
"""Folder of the package."""
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}


class Module:
    """The definitions of one file."""

    def __init__(self, name: str):
        path = FOLDER / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        """Module and name of each name imported from the package."""
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ClassDef):
                self.definitions[statement.name] = statement
            elif isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(PACKAGE):
                for alias in statement.names:
                    self.imports[alias.asname or alias.name] = (statement.module or "", alias.name)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self.definitions[statement.targets[0].id] = statement
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self.definitions[statement.target.id] = statement
            elif isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "(COMPONENT, CONFIG)":
                self.definitions["COMPONENT, CONFIG"] = statement

    def find(self, name: str) -> tuple["Module", ast.stmt] | None:
        """Returns the definition of a name, in the file that defines it. None if it is not of the package."""
        if name in self.definitions:
            return self, self.definitions[name]
        if name not in self.imports:
            return None
        module, original = self.imports[name]
        return read(module).find(original)


@cache
def read(name: str) -> Module:
    """Returns the definitions of the module `name` of the package."""
    return Module(name)


@dataclass(frozen=True, slots=True, eq=False)
class Class:
    """A class where it is defined."""

    module: Module
    node: ast.ClassDef

    @property
    def text(self) -> str:
        """The docstring."""
        return ast.get_docstring(self.node) or ""

    @property
    def is_enum(self) -> bool:
        """Returns whether it is an enumeration."""
        return any(ast.unparse(base) == "StrEnum" for base in self.node.bases)

    def bases(self) -> Iterator["Class"]:
        """Yields this class and those it is derived from, in the order in which Python looks for attributes."""
        found: list[Class] = [self]
        for base in self.node.bases:
            parent = class_of(self.module, base)
            found += list(parent.bases()) if parent else []
        # Of a class that is met twice, the last place counts.
        last = {each.node: index for index, each in enumerate(found)}
        yield from (each for index, each in enumerate(found) if last[each.node] == index)

    def fields(self) -> list["Field"]:
        """Returns the fields of a dataclass, inherited ones first."""
        found: dict[str, Field] = {}
        for kind in reversed(list(self.bases())):
            for name, statement, text in _documented(kind.node):
                if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
                    continue
                known = found.get(name)
                text = text or (known.text if known else "")
                found[name] = Field(name, kind.module, statement.annotation, statement.value, text)
        return list(found.values())

    def members(self) -> dict[str, str]:
        """Returns the docstrings of an enumeration's values."""
        return {
            str(evaluate(self.module, statement.value)): text
            for _, statement, text in _documented(self.node)
            if isinstance(statement, ast.Assign)
        }

    def member(self, name: str) -> Any:
        """Returns the value of a member of an enumeration, or of an attribute of a class."""
        for found, statement, _ in _documented(self.node):
            if found == name and statement.value is not None:
                return evaluate(self.module, statement.value)
        raise Unreadable(f"{self.node.name}.{name}")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass."""

    name: str
    module: Module
    """File that declares it."""
    annotation: ast.expr
    default: ast.expr | None
    text: str
    """The docstring below it."""


class Unreadable(Exception):
    """An expression that `evaluate` does not know."""


def class_of(module: Module, node: ast.expr) -> Class | None:
    """Returns the class of the package that an expression names, such as a base. None for any other expression."""
    if isinstance(node, ast.Subscript):
        node = node.value
    found = module.find(node.id) if isinstance(node, ast.Name) else None
    return Class(found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None


def named(module: str, name: str) -> Class:
    """Returns the class `name` of `module`."""
    found = class_of(read(module), ast.Name(name))
    assert found, f"{module} defines no class {name}"
    return found


def settings_class(module: str) -> Class:
    """Returns CONFIG of a component's file, which ends `COMPONENT, CONFIG = TheClass, TheConfig`."""
    statement = read(module).definitions["COMPONENT, CONFIG"]
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple)
    found = class_of(read(module), statement.value.elts[1])
    assert found, f"{module} ends with its settings"
    return found


def evaluate(module: Module, node: ast.expr | None) -> Any:
    """Returns the value of an expression of constants, of names of constants and of members of enumerations.

    Raises:
        Unreadable: it is another expression.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -evaluate(module, node.operand)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](evaluate(module, node.left), evaluate(module, node.right))
        case ast.List() | ast.Tuple():
            return [evaluate(module, each) for each in node.elts]
        case ast.Attribute() if owner := class_of(module, node.value):
            return owner.member(node.attr)
        case ast.Name() if (found := module.find(node.id)) and isinstance(found[1], ast.Assign | ast.AnnAssign):
            return evaluate(found[0], found[1].value)
    raise Unreadable(ast.unparse(node) if node else "nothing")


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign | ast.Assign, str]]:
    """Yields the attributes of a class with the docstrings below them."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        else:
            continue
        if isinstance(target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield target.id, statement, " ".join(text.split()) if isinstance(text, str) else ""
