"""What the pages quote of the code is in the code: messages, settings, files, numbers."""

import ast
import json
import re
from functools import cache
from typing import Any

import pytest
import yaml

from rlframe.config.overrides import SHORT
from rlframe.run.settings.tree import component, components, kinds_of_components, whole
from tests.meta.checkout import ROOT
from tests.meta.docs.pages import PAGES, all_blocks
from tests.mutations.catalogue import MUTATIONS

SETTING = re.compile(r"(?<![\w/.-])([a-z_]+(?:\.[a-z_]+)+)(?==|`|$)")
FILE = re.compile(r"`((?:rlframe|tests|examples|configs|docs|docker)/[\w./-]+)`")
END = "\1"
"""Stands between two strings of the code."""
NO_SETTINGS = {"rollout.n", "algorithm.train_batch"}
"""A setting of verl's, and a line of the step."""
FREE = {"reward.parts", "environment.options", "rollout.engine_options", "data.chat_template_kwargs", "data.path"}
"""Sections below which names are the user's."""


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@cache
def sentences() -> str:
    """Returns every string of the code, one after the other, with a gap for each part that is filled in."""
    files = sorted((ROOT / "rlframe").rglob("*.py"))
    return END.join(found for file in files for found in strings(file.read_text(encoding="utf-8")))


def strings(source: str) -> list[str]:
    """Returns the strings of a source, and those that a tuple puts together, as rules of faults that name keys do."""
    nodes = list(ast.walk(ast.parse(source)))
    tuples = [node for node in nodes if isinstance(node, ast.Tuple)]
    return [written(node) for node in nodes] + ["".join(map(written, node.elts)) for node in tuples]


def written(node: ast.AST) -> str:
    """Returns the text of a string, with a gap for what is filled in; a gap for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "".join(map(written, node.values)) if isinstance(node, ast.JoinedStr) else "\0"


def is_said(quoted: str) -> bool:
    """Returns whether the pieces of a message stand in this order in a string of the code. A piece may begin or end
    with what is filled in."""
    pieces = [re.escape(piece.strip()) for piece in quoted.split("...")]
    return re.search(f"[^{END}]*?".join(pieces), sentences()) is not None


def messages() -> list[str]:
    """Returns the messages that the page on troubleshooting quotes."""
    _, _, tables = text_of("troubleshooting.md").partition("## Configuration")
    rows = tables.partition("## Without a message")[0].splitlines()
    return [quoted for row in rows if row.startswith("| `") for quoted in re.findall(r"`([^`]+)`", row.split("|")[1])]


@cache
def settings() -> list[re.Pattern[str]]:
    """Returns a pattern for the key of each setting and section, whatever names of one's own are in it."""
    found = [each.key for part in whole().walk() for each in (part, *part.settings)]
    for kind in kinds_of_components():
        for name in components(kind):
            found += [each.key for part in component(kind, name).walk() for each in (part, *part.settings)]
    sections = [key.rpartition(".")[0] for key in found]
    return [re.compile(re.escape(key).replace("NAME", "[^.]+")) for key in dict.fromkeys(found + sections) if key]


def exists(key: str) -> bool:
    """Returns whether a dotted key is that of a setting."""
    free = any(key == each or key.startswith(f"{each}.") for each in FREE)
    return free or key in SHORT or any(setting.fullmatch(key) for setting in settings())


def test_each_message_of_the_page_is_one_of_the_code() -> None:
    assert len(messages()) > 40
    assert [message for message in messages() if not is_said(message)] == []


def test_a_message_that_is_not_in_the_code_is_seen() -> None:
    assert not is_said("the moon must be made of ... cheese") and not is_said("must have ... made of cheese")
    assert "at \0 most" in strings('f"at {x} most"') and "ab\0" in strings('("a", f"b{c}")') and is_said("is not a key")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_setting_that_a_page_names_exists(page: Any) -> None:
    sections = {part.key.partition(".")[0] for part in whole().walk()}
    quoted = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    named = {key for text in quoted for key in SETTING.findall(text) if key.partition(".")[0] in sections} - NO_SETTINGS
    ending = (".md", ".json", ".jsonl", ".yaml", ".py")
    assert [key for key in sorted(named) if not key.endswith(ending) and not exists(key)] == []


def test_a_setting_that_does_not_exist_is_seen() -> None:
    assert exists("train.optimizer.lr") and exists("algorithm.group_size") and exists("algorithm.correction.weight_cap")
    assert not exists("train.optimizer.lrr") and not exists("algorithm.nothing") and not exists("loop.lag")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_file_that_a_page_names_exists(page: Any) -> None:
    named = set(FILE.findall(page.read_text(encoding="utf-8")))
    shown = [name for name in sorted(named) if not re.search(r"[A-Z]{3,}|\bx\b|mine", name)]
    assert [name for name in shown if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("block", all_blocks("python") + all_blocks("yaml"), ids=lambda block: block.place)
def test_each_example_can_be_read(block: Any) -> None:
    ast.parse(block.text) if block.language == "python" else yaml.safe_load(block.text)


def test_the_number_of_planted_faults_is_the_one_that_was_measured() -> None:
    results = json.loads((ROOT / "examples/benchmarks/results/mutations.json").read_text(encoding="utf-8"))
    planted = f"{results['planted']} were planted and {results['outcomes']['killed']} were noticed"
    page = " ".join(text_of("faults.md").split())
    assert planted in page
    more_than = re.search(r"more than (\d+)", page)
    assert more_than and len(MUTATIONS) // 100 * 100 == int(more_than[1])
