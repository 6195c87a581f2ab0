"""What the command lines of all tools have in common."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlframe.launch import tool_names
from rlframe.utils.arguments import NOT_READ
from tests.unit.loops.report.runs import record, run_folder, write_samples

pytestmark = pytest.mark.later
WITH_ARGUMENTS = [
    name for name in tool_names() if inspect.signature(importlib.import_module(f"rlframe.tools.{name}").main).parameters
]


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_tool_for_runs_takes_ones_own_configurations(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"rlframe.tools.{name}").main(["--help"])
    said = capsys.readouterr().out
    assert ("--config-name" in said) == ("--config-dir" in said)


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_misspelt_option_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"rlframe.tools.{name}").main(["--halp"])
    assert ended.value.code == 2
    assert "--halp is not an option; did you mean --help?" in capsys.readouterr().err


def test_output_that_nobody_reads_any_more_ends_a_tool_without_a_word(tmp_path: Path) -> None:
    output = run_folder(tmp_path / "run")
    write_samples(output, *(record(1, text=f"r{number}" * 100) for number in range(1000)))
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "rlframe.tools.rollouts", str(output)]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (NOT_READ, b"")
