"""Every command of the documentation is one that works, as far as this machine can tell without starting a run.

`rlframe.main` commands are composed, built and checked; those under `<!-- needs: ... -->` only composed and built. The
tools read their command lines. `tests/e2e/test_docs.py` runs what is marked `<!-- run -->`.
"""

import argparse
import importlib
import inspect
import itertools
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlframe.launch import tool_of
from rlframe.run.config import RunConfig
from rlframe.run.folder import claim
from rlframe.run.load import load
from rlframe.run.settings.tree import find
from rlframe.utils.errors import ConfigError
from tests.meta.checkout import ROOT
from tests.meta.docs.pages import PAGES, Block, all_blocks, blocks, files_of, records, words

pytestmark = pytest.mark.later

BLOCKS = all_blocks("bash")
CHECKED = [block for block in BLOCKS if not block.needs and block.comment not in ("refused", "run")]
"""Blocks whose commands are checked as a whole. The others need more, are refused, or are run."""
MAIN = ["python", "-m", "rlframe.main"]
TOOL = "rlframe.tools."
NO_RUN = {"--help", "--cfg", "-m", "--multirun", "-sc"}
"""Options of `rlframe.main` that begin no run, or several."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PLAIN = set("git cd . tail head ray kill tensorboard docker kubectl printf sky export eval".split())
"""Programs whose command lines are not looked at."""


class Parsed(Exception):
    """Ends a tool after it has read its command line."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what a reader of the pages has: the checkout's files, and an own model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def write_files(page: Path, folder: Path) -> None:
    """Writes the files that a page shows."""
    for name, text in files_of(page).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(records(text, count=400) if name.endswith(".jsonl") else text, encoding="utf-8")


def own_model(folder: Path) -> None:
    """Makes a small dense model with the tokenizer of an embedded one."""
    from tests import tiny_models

    embedded = ROOT / "rlframe" / "models" / "embedded" / "qwen3_moe_tiny"
    vocab_size = yaml.safe_load((embedded / "config.json").read_text())["vocab_size"]
    tiny_models.make("qwen3", folder, vocab_size=vocab_size, max_position_embeddings=2048)
    for file in embedded.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)


def main_arguments(line: list[str]) -> tuple[str, str | None, list[list[str]]]:
    """Returns the configuration's name, the folder of one's own YAML files, and the overrides of each run: of a sweep
    its first and its last one."""
    line, name, place, overrides, sweep = list(line), "grpo_qwen3_moe", None, [], False
    while line:
        word = line.pop(0)
        if word == "--config-name":
            name = line.pop(0)
        elif word == "--config-dir":
            place = line.pop(0)
        elif word in ("-m", "--multirun"):
            sweep = True
        elif word == "--help":
            assert not line or find(line.pop(0))
        elif word == "--cfg":
            line = line[1:]
        elif word == "-sc":
            assert line.pop(0).startswith("install=")
        else:
            assert not word.startswith("-"), word
            overrides.append(word)
    if not sweep:
        return name, place, [overrides]
    each = [word.split("=")[1].split(",") for word in overrides]
    keys = [word.split("=")[0] for word in overrides]
    return name, place, [[f"{key}={values[at]}" for key, values in zip(keys, each, strict=True)] for at in (0, -1)]


def check_main(line: list[str], *, whole: bool) -> None:
    """Composes and builds what the command would run, and checks it if `whole`."""
    name, place, runs = main_arguments(line)
    for overrides in runs:
        run = load(name, overrides, **({"config_dir": place} if place else {}))
        if whole:
            from rlframe.run.check import check

            check(run)


def check_tool(name: str, line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the tool's own parser read the command line, and goes no further. A tool without one is run."""

    def parsed(parse: Any) -> Any:
        def stop(parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None) -> None:
            parse(parser, arguments, namespace)
            raise Parsed

        return stop

    with monkeypatch.context() as patch:
        for method in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, method, parsed(getattr(argparse.ArgumentParser, method)))
        main = importlib.import_module(f"{TOOL}{name}").main
        if not inspect.signature(main).parameters:
            assert not line
            main()
            return
        with pytest.raises(Parsed):
            main(line)


def inner(line: list[str]) -> list[str]:
    """Returns the command as `python -m ...`, whichever way it is started: by the console script, as a job, or in a
    shell's loop, whose first round it is."""
    if line[0] == "for":
        variable, first = f"${line[1]}", line[3].rstrip(";")
        return inner([word.replace(variable, first) for word in line[line.index("do") + 1 : line.index("&")]])
    if line[0] == "rlframe":
        tool = tool_of(line[1:])
        return ["python", "-m", f"{TOOL}{tool}", *line[2:]] if tool else [*MAIN, *line[1:]]
    if line[0] == "ray" and MAIN[2] in line:
        return line[line.index("--") + 1 :]
    if line[0] == "sbatch":
        script = next(word for word in line[1:] if not word.startswith("-"))
        assert (ROOT / script).is_file(), line
        return [*MAIN, *line[line.index(script) + 1 :]]
    return line


def check_command(line: list[str], *, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks one command."""
    while re.match(r"[A-Z_]+=", line[0]):
        line = line[1:]
    line = inner(line)
    program = line[0]
    if line[:3] == MAIN:
        check_main(line[3:], whole=whole)
    elif line[:2] == ["python", "-m"] and line[2].startswith(TOOL):
        check_tool(line[2].removeprefix(TOOL), line[3:], monkeypatch)
    elif line[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(line[2]), line
    elif program == "python":
        assert (ROOT / line[1]).is_file(), line
    elif program == "pip":
        own = re.findall(r"(?:rlframe|\.)\[([\w,]+)\]", " ".join(line))
        extras = {extra for found in own for extra in found.split(",")}
        assert extras <= EXTRAS.keys(), line
    elif program == "make":
        assert re.search(rf"^{line[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), line
    else:
        assert program in PLAIN, line


def check_block(block: Block, *, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks each command of a block, up to the first pipe."""
    for command in block.commands:
        line = list(itertools.takewhile(lambda word: word not in ("|", ">", "2>"), words(command)))
        if line:
            check_command(line, whole=whole, monkeypatch=monkeypatch)


def test_the_pages_have_commands() -> None:
    assert len(BLOCKS) > 25 and sum(block.comment == "run" for block in BLOCKS) > 4


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_each_command_of_a_block_is_composed(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(block.page, folder)
    if block.comment == "refused":
        with pytest.raises(ConfigError) as refusal:
            check_block(block, whole=False, monkeypatch=monkeypatch)
        answer = next(each for each in blocks(block.page) if each.line > block.line)
        assert str(refusal.value).strip() == answer.text
    else:
        check_block(block, whole=False, monkeypatch=monkeypatch)


def runs_of(page: Path) -> Iterator[tuple[str, RunConfig]]:
    """Yields the commands of a page that begin a run, and the runs."""
    for block in blocks(page):
        commands = block.commands if block.language == "bash" and block.comment != "refused" else []
        for command in commands:
            line = list(itertools.takewhile(lambda word: word not in ("|", ">", "2>"), words(command)))
            line = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), line))
            line = inner(line) if line else []
            if line[:3] == MAIN and not NO_RUN & set(line):
                name, place, (overrides,) = main_arguments(line[3:])
                yield command, load(name, overrides, **({"config_dir": place} if place else {}))


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_follow_those_of_the_first_run_and_each_other(page: Path, folder: Path) -> None:
    """A folder belongs to the run that has begun in it."""
    for each in dict.fromkeys([ROOT / "docs" / "first_run.md", page]):
        write_files(each, folder)
        for command, run in runs_of(each):
            try:
                claim(run).close()
            except ConfigError as error:
                pytest.fail(f"{each.name}: {command}: {error}")


@pytest.mark.thorough
@pytest.mark.parametrize("block", CHECKED, ids=lambda block: block.place)
def test_each_command_of_a_block_has_no_fault(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(block.page, folder)
    own_model(folder / "my_model")
    check_block(block, whole=True, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "python -m rlframe.main --config-name grpo_qwen3_moe train.optimizer.lrr=1",
        "python -m rlframe.main --config-name no_such_recipe",
        "python -m rlframe.tools.convert to-megatron --model x",
        "python -m rlframe.tools.audit a b",
        "pip install 'rlframe[nothing]'",
        "make everything",
        "rm -r outputs",
    ],
)
def test_a_command_that_does_not_work_is_seen(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConfigError, AssertionError, SystemExit)):
        check_command(words(command), whole=False, monkeypatch=monkeypatch)
    capsys.readouterr()
