import json

import pytest

from rlframe.utils.text import json_line, printable

HOSTILE = ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b2J", "\u202eevil", "a\rb", "\ud800", "\x00", "\u2028"]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_steers_a_terminal_is_spelled_out(text: str) -> None:
    safe = printable(text)
    assert not set(safe) & set("\x00\x07\r\x1b\x9b\u2028\u202e\ud800")
    assert safe.encode("utf-8").decode("utf-8") == safe


def test_ordinary_text_of_any_language_stays_as_it_is() -> None:
    text = "2+3=5\n\tdas Ma\u00df, \u6570\u5b66, \u0627\u0644\u0639\u0631\u0628\u064a\u0629, \U0001f44d"
    assert printable(text) == text


def test_an_escape_is_spelled_by_its_code_point() -> None:
    assert printable("\x1b[31m\u202e") == "\\u001b[31m\\u202e"


@pytest.mark.parametrize("text", [*HOSTILE, 'quote " and \\ and \n', "\U0001f44d"])
def test_a_line_of_json_reads_back_exactly(text: str) -> None:
    line = json_line({"step": 1, "text": text})
    assert line.count("\n") == 1
    assert json.loads(line.encode("utf-8")) == {"step": 1, "text": text}
