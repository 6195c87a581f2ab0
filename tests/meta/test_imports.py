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


def test_names_that_are_imported_from_rlframe_exist() -> None:
    """Benchmarks and tests on GPUs are not run here, and not all of them can be imported."""
    known: dict[str, set[str] | None] = {}
    wrong = []
    for path in python_files():
        if not {"examples", "gpu"} & set(path.relative_to(ROOT).parts):
            continue
        for module, name in names_of_rlframe(ast.parse(path.read_text(encoding="utf-8"))):
            if module not in known:
                known[module] = defined(module)
            names = known[module]
            is_module = defined(f"{module}.{name}") is not None
            if not is_module and (names is None or name not in names):
                wrong.append(f"{path.relative_to(ROOT)}: {module}.{name}")
    assert len(known) > 100 and wrong == []


def names_of_rlframe(tree: ast.Module) -> list[tuple[str, str]]:
    """Modules of rlframe, and names that a file imports from them."""
    return [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rlframe"
        for alias in node.names
    ]


def defined(module: str) -> set[str] | None:
    """Names that a module of rlframe binds, also in a branch. None if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return set() if path.is_dir() else None
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


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
