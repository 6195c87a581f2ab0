"""The README says what the code does."""

import ast
import textwrap

from tests.meta.checkout import ROOT, code_block


def test_the_step_in_the_readme_is_the_source() -> None:
    source = (ROOT / "rlframe/loops/online.py").read_text(encoding="utf-8")
    loop = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "RolloutLoop"
    )
    step = next(node for node in loop.body if isinstance(node, ast.FunctionDef) and node.name == "step")
    lines = source.splitlines()[step.lineno - 1 : step.end_lineno]
    assert code_block("rlframe/loops/online.py RolloutLoop.step") == textwrap.dedent("\n".join(lines))


def test_each_set_up_command_is_one_line_that_starts_from_nothing() -> None:
    for marker, ending in (
        ("run command", "python -m rlframe.main --config-name grpo_qwen3_moe"),
        ("test command", "make test"),
    ):
        (command,) = code_block(marker).splitlines()
        assert command.startswith("python -m venv .venv && . .venv/bin/activate && pip install ")
        assert command.endswith(f" && {ending}")


def test_every_config_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {
        line.split("--config-name ")[1].split()[0].strip("`") for line in text.splitlines() if "--config-name " in line
    }
    assert names and all((ROOT / "configs" / f"{name}.yaml").is_file() for name in names)
