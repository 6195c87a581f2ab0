"""Sizes: what fits on a screen gets read."""

from tests.meta.checkout import ROOT, functions, python_files

MOST_LINES_OF_FILE = 500
MOST_LINES_OF_FUNCTION = 60
MOST_LINES_OF_STEP = 40


def test_no_file_is_over_its_budget() -> None:
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {name: lines for name, lines in sizes.items() if lines > MOST_LINES_OF_FILE} == {}


def test_no_function_is_over_its_budget() -> None:
    over = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in python_files()
        for node, lines in functions(path)
        if lines > MOST_LINES_OF_FUNCTION
    }
    assert over == {}


def test_the_step_is_one_screen() -> None:
    steps = [lines for node, lines in functions(ROOT / "rlframe/loops/online.py") if node.name == "step"]
    assert len(steps) == 1 and steps[0] <= MOST_LINES_OF_STEP


def test_python_files_are_ascii() -> None:
    assert [str(path.relative_to(ROOT)) for path in python_files() if not path.read_bytes().isascii()] == []
