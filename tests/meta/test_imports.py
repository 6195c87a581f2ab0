"""One root for the tests: a helper has one name, and its classes exist once."""

import ast

from tests.meta.checkout import ROOT, python_files


def test_helpers_of_tests_are_imported_by_their_name_under_tests() -> None:
    ours = {path.stem for path in (ROOT / "tests").iterdir()}
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files()
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0] in ours | {""}
    ]
    assert {"unit", "meta", "tiny_models"} <= ours
    assert wrong == []


def imported(tree: ast.Module) -> list[str]:
    """Modules that a file names in its imports; a relative one begins with a dot."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_what_is_imported_is_seen() -> None:
    source = "import unit.a\nfrom meta.b import c\ndef f():\n    from . import d\n    from .e import g\n"
    assert imported(ast.parse(source)) == ["unit.a", "meta.b", ".", ".e"]
