"""Files of JSON lines, of which a resumed run can cut off what it will do again, or learn what it has done."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlframe.utils.errors import OutputError
from rlframe.utils.files.whole import write_whole, writing
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


def keep_whole(file: Path, key: str, others: Collection[str]) -> dict[Any, dict[str, Any]]:
    """Cuts off a half-written line at the end of a JSONL file. Returns what its lines have of `others`, by their values
    of `key`.

    Raises:
        OutputError: a line is not an object with `key`.
    """
    found: dict[Any, dict[str, Any]] = {}
    if not file.exists():
        return found
    whole_bytes = 0
    with writing(file), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                found[record[key]] = {name: record[name] for name in others if name in record}
            except (ValueError, TypeError, KeyError) as error:
                raise OutputError(
                    f"{file}: line {number} is not an object with {key!r}; move the file away to begin anew"
                ) from error
            whole_bytes += len(line)
    with writing(file):
        os.truncate(file, whole_bytes)
    return found
