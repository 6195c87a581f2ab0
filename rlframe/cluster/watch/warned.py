"""The warnings of a worker: a file of JSON lines beside its log, which the driver gathers."""

import json
import time
from pathlib import Path
from typing import Any

from rlframe.utils.errors import OutputError
from rlframe.utils.files.jsonl import append
from rlframe.utils.secrets import hidden
from rlframe.utils.warned import OwnWarnings

FILES = "*.warnings.jsonl"


def note_warnings(log: Path) -> OwnWarnings:
    """Writes the warnings of this process beside its log, from now on. Those of an earlier process are removed."""
    file = log.with_suffix(".warnings.jsonl")
    file.unlink(missing_ok=True)

    def note(of: str, text: str) -> None:
        try:
            append(file, {"time_s": round(time.time(), 3), "role": log.stem, "of": of, "text": hidden(text)})
        except OutputError:
            # It is in the log too, and a warning must not end a run.
            warnings.close()

    warnings = OwnWarnings(note)
    warnings.begin()
    return warnings


def read_warnings(file: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the whole lines of a worker's file from byte `start` on, and the byte behind them. A file that is shorter
    is that of a new process."""
    try:
        with file.open("rb") as content:
            content.seek(start if start <= file.stat().st_size else 0)
            begun = content.tell()
            whole, newline, _ = content.read().rpartition(b"\n")
    except OSError:
        return [], start
    return [json.loads(line) for line in whole.split(b"\n") if line], begun + len(whole + newline)
