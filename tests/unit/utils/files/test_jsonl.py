"""Files of JSON lines, and what a resumed run keeps of them."""

import json
import pathlib

from rlframe.utils.files.jsonl import append, keep_steps


def lines(file: pathlib.Path) -> list[dict]:
    """A JSONL file's records."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def test_keep_steps_cuts_off_what_will_be_made_again(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for step in (0, 1, 2, 2, 3, 4):
        append(file, {"step": step, "x": step / 2})
    keep_steps(file, 2)
    assert [line["step"] for line in lines(file)] == [0, 1, 2, 2]
    append(file, {"step": 3})
    assert [line["step"] for line in lines(file)] == [0, 1, 2, 2, 3]
    keep_steps(file, -1)
    assert file.read_text() == ""
    keep_steps(tmp_path / "absent.jsonl", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_keep_steps_drops_a_line_that_a_crash_left_half_written(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "samples.jsonl"
    append(file, {"step": 1, "text": "whole"})
    first = file.read_bytes()
    append(file, {"step": 2, "text": "\u4e8c\u4e8c"})  # three bytes a character: some cuts fall inside one
    both = file.read_bytes()
    for cut in range(1, len(both) - len(first)):
        file.write_bytes(both[:-cut])
        keep_steps(file, 9)
        # Without its line feed alone, the line is complete.
        assert file.read_bytes() == (both if cut == 1 else first), cut


def test_keep_steps_keeps_text_with_every_kind_of_line_break(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "samples.jsonl"
    texts = [f"a{chr(code)}b" for code in (0x0A, 0x0D, 0x0B, 0x0C, 0x1C, 0x85, 0x2028, 0x2029)]
    for step, text in enumerate(texts):
        append(file, {"step": step, "text": text})
    keep_steps(file, 99)
    assert [line["text"] for line in lines(file)] == texts
