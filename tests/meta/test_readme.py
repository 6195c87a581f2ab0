"""The README and the page on the design say what the code does."""

import ast
import re
import textwrap

from tests.meta.checkout import ROOT, code_block

DESIGN = ROOT / "docs" / "design.md"


def test_the_step_of_the_page_on_the_design_is_the_source() -> None:
    source = (ROOT / "rlframe/loops/online.py").read_text(encoding="utf-8")
    loop = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "RolloutLoop"
    )
    step = next(node for node in loop.body if isinstance(node, ast.FunctionDef) and node.name == "step")
    lines = source.splitlines()[step.lineno - 1 : step.end_lineno]
    assert code_block("rlframe/loops/online.py RolloutLoop.step", page=DESIGN) == textwrap.dedent("\n".join(lines))


def test_each_set_up_command_is_one_line_that_starts_from_nothing() -> None:
    for marker, ending in (
        ("run command", "python -m rlframe.main --config-name grpo_qwen3_moe"),
        ("test command", "make test"),
    ):
        (command,) = code_block(marker).splitlines()
        assert command.startswith("python -m venv .venv && . .venv/bin/activate && pip install ")
        assert command.endswith(f" && {ending}")


def test_the_readme_is_one_screen_and_its_figure_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    (figure,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert (ROOT / figure).is_file()


def test_every_config_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {
        line.split("--config-name ")[1].split()[0].strip("`") for line in text.splitlines() if "--config-name " in line
    }
    assert names and all((ROOT / "configs" / f"{name}.yaml").is_file() for name in names)
