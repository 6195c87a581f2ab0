"""The command lines of tools: the nearest name after a misspelt one."""

import pytest

from rlframe.utils.arguments import Parser


def parser() -> Parser:
    made = Parser(prog="tool")
    made.add_argument("--model", required=True)
    made.add_argument("--dtype", choices=["float32", "bfloat16"])
    return made


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--modle", "x"], "--modle is not an option; did you mean --model?"),
        (["--model=x", "--dtpe=float32"], "--dtpe is not an option; did you mean --dtype?"),
        (["--model=x", "--dtype=bfloat6"], "did you mean bfloat16?"),
        (["--model=x", "--quite-another"], "--quite-another is not an option\n"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_nearest(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_beginning_of_an_option_is_no_misspelling(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--mod=x", "stray"])
    assert "did you mean" not in capsys.readouterr().err


def test_the_choices_of_commands_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    made = Parser(prog="tool")
    commands = made.add_subparsers(dest="command")
    commands.add_parser("to-megatron").add_argument("--checkpoint")
    with pytest.raises(SystemExit):
        made.parse_args(["to-megatrn"])
    assert "did you mean to-megatron?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        made.parse_args(["to-megatron", "--chekpoint=x"])
    assert "--chekpoint is not an option; did you mean --checkpoint?" in capsys.readouterr().err
    # What a program says of its work is no fault of an option.
    with pytest.raises(SystemExit):
        made.parse_args(["to-megatron", "--checkpoint=x"])
        made.error("there is no x")
    assert "is not an option" not in capsys.readouterr().err
