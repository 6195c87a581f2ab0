"""Every YAML file composes, and every field of a configuration says what it is."""

import ast
import importlib
import inspect
import re
from dataclasses import fields, is_dataclass

import pytest

from rlframe.run.config import RunConfig
from rlframe.run.load import load
from rlframe.utils.registry import names
from tests.meta.checkout import ROOT

CONFIGS = ROOT / "configs"
RUNS = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "base")
CHOICES = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.glob("*/*.yaml"))
TO_BE_GIVEN = {
    "environment/gymnasium": ["environment.options.id=CartPole-v1"],
    "environment/openenv": ["environment.options.url=http://127.0.0.1:8000"],
    "reward/judge": [
        f"reward.parts.judge.options.endpoint.{setting}" for setting in ("base_url=http://127.0.0.1:8000/v1", "model=m")
    ],
    "environment/search": ["environment.options.tools.search.options.corpus=corpus.jsonl"],
}
"""Choices that leave a value to the user."""
PARAPHRASED = {
    "model",
    "data",
    "reward",
    "rollout",
    "train",
    "weight_sync",
    "cluster",
    "checkpoint",
    "evaluation",
    "logging",
}
"""Sections of RunConfig, described by the docstring of their dataclass."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_composes(name: str) -> None:
    run = load(name)
    assert isinstance(run, RunConfig) and run.name == name and run.output == f"outputs/{name}"


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_a_group_composes(choice: str) -> None:
    group, name = choice.split("/")
    assert isinstance(load("grpo_qwen3_moe", [f"{group}={name}", *TO_BE_GIVEN.get(choice, [])]), RunConfig)


@pytest.mark.parametrize(("folder", "group"), [("algorithms", "algorithm"), ("rollout", "rollout")])
def test_every_extension_has_its_yaml(folder: str, group: str) -> None:
    extensions = names(f"rlframe.{folder}")
    assert extensions
    assert [name for name in extensions if not (CONFIGS / group / f"{name}.yaml").is_file()] == []


def test_every_extension_is_named_like_its_file() -> None:
    for folder in ("algorithms", "rollout"):
        for name in names(f"rlframe.{folder}"):
            assert importlib.import_module(f"rlframe.{folder}.{name}").CONFIG().name == name


def test_every_config_field_has_a_docstring() -> None:
    missing = []
    for path in (ROOT / "rlframe").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
                missing += [f"{node.name}.{name}" for name in _undocumented(node)]
    assert [name for name in missing if name.removeprefix("RunConfig.") not in PARAPHRASED] == []


def test_sections_without_a_docstring_have_one_on_their_dataclass() -> None:
    for field in fields(RunConfig):
        if field.name in PARAPHRASED:
            assert is_dataclass(field.type) and not inspect.getdoc(field.type).startswith(field.type.__name__ + "(")


def test_the_page_of_recipes_names_every_run_and_no_other() -> None:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    tables = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in tables for name in re.findall(r"`(\w+)`", cell)) == RUNS


def _undocumented(node: ast.ClassDef) -> list[str]:
    """Annotated fields that no string follows."""
    pairs = zip(node.body, [*node.body[1:], None], strict=True)
    return [
        statement.target.id
        for statement, after in pairs
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
    ]
