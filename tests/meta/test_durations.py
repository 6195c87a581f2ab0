"""The tiers of the Makefile keep to their minutes, by what `make durations` measured."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.durations import RECORD
from tests.meta.checkout import ROOT

MINUTES = {"QUICK": 2.0, "ALL": 9.0}
"""Of `make check` and `make test`, on CORES cores."""
CORES = 2
BUSY = 0.85
"""The share of the cores' time that is used: tests wait for processes, and the last file runs alone."""
BEFORE_S = 10.0
"""Wall-clock seconds until the first test runs, in which nothing is measured: `make`, and the start of workers. What
they collect counts as their first test."""
LINT_S = 30.0
"""CPU seconds of `make lint`, which runs beside the tests."""
MARKS = {"QUICK": {"thorough", "engine", "later"}, "ALL": {"thorough", "engine"}}
"""Of tests that a tier leaves to another."""


def folders(name: str) -> list[Path]:
    """The folders that the Makefile lists under a name."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(rf"^{name} = (.*)$", makefile, re.MULTILINE)
    assert listed, f"the Makefile has {name}"
    words = listed[1].split()
    return [folder for word in words for folder in (folders("QUICK") if word == "$(QUICK)" else [ROOT / word])]


def files(name: str) -> list[str]:
    """Test files of those folders that have a test for the tier."""
    found = [file for folder in folders(name) for file in folder.rglob("test_*.py")]
    return sorted(str(file.relative_to(ROOT)) for file in found if belongs(ast.parse(file.read_text("utf-8")), name))


def belongs(tree: ast.Module, tier: str) -> bool:
    """Whether some test of a file has none of the tier's MARKS."""
    whole = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]

    def marked(node: ast.expr) -> bool:
        """Whether a mark is on everything that this decorates: not only on a parameter."""
        each = node.elts if isinstance(node, ast.List) else [node]
        return any(ast.unparse(one).removeprefix("pytest.mark.") in MARKS[tier] for one in each)

    return not any(map(marked, whole)) and any(not any(map(marked, test.decorator_list)) for test in tests)


def test_every_file_of_a_tier_has_its_seconds() -> None:
    measured = json.loads(RECORD.read_text())["cpu_s"]
    assert [file for file in files("ALL") if file not in measured] == [], "python -m pytest -p tests.durations FILE"
    assert [file for file in measured if not (ROOT / file).exists()] == [], "make durations"


def test_a_tier_fits_its_minutes() -> None:
    record = json.loads(RECORD.read_text())
    if not record["quiet"]:
        pytest.skip("tests/durations.json was measured beside other work: `make durations` on a quiet machine")
    measured = record["cpu_s"]
    for name, minutes in MINUTES.items():
        seconds = sum(measured[file] for file in files(name) if file in measured)
        room = (60 * minutes - BEFORE_S) * CORES * BUSY - LINT_S
        assert seconds <= room, f"{name} takes {seconds:.0f} CPU seconds of {room:.0f}: make tests cheaper, or thorough"


def test_a_file_belongs_to_a_tier_by_its_marks() -> None:
    usual = "@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.thorough)])\ndef test_a(): pass\n"
    other = "@pytest.mark.thorough\ndef test_b(): pass\n"
    later = f"pytestmark = pytest.mark.later\n{usual}"
    assert all(belongs(ast.parse(usual), tier) and belongs(ast.parse(usual + other), tier) for tier in MARKS)
    assert not any(belongs(ast.parse(other), tier) for tier in MARKS)
    assert not any(belongs(ast.parse(f"pytestmark = [pytest.mark.engine, other]\n{usual}"), tier) for tier in MARKS)
    assert belongs(ast.parse(later), "ALL") and not belongs(ast.parse(later), "QUICK")
