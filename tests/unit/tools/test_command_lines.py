"""What the command lines of all tools have in common."""

import importlib
import inspect

import pytest

from rlframe.launch import tool_names

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
