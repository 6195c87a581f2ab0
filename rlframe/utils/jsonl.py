"""Files of JSON lines, each of which names its step, so that a resumed run can cut off what it will do again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframe.utils.files import write_whole, writing
from rlframe.utils.text import json_line


def append(file: Path, *records: Mapping[str, Any]) -> None:
    """Appends a line for each record, all in one write."""
    with writing(file), file.open("a", encoding="utf-8") as out:
        out.write("".join(map(json_line, records)))


def keep_steps(file: Path, done_steps: int) -> set[str]:
    """Truncates a JSONL file to the lines of steps up to `done_steps`, without a half-written line. Returns the keys of
    the remaining lines, except `step`."""
    known: set[str] = set()
    if not file.exists():
        return known
    kept = []
    # In bytes: a crash may split a character, and texts may hold line breaks at which str.splitlines would split.
    for line in file.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] <= done_steps:
            kept.append(line + b"\n")
            known |= set(record) - {"step"}
    write_whole(file, b"".join(kept))
    return known
