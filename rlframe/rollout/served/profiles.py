"""The files that an engine's own profiler writes."""

import shutil
from pathlib import Path

from rlframe.cluster.profiling.request import Request


def collected(written: Path, request: Request) -> list[Path]:
    """Moves the traces and snapshots below `written` to the step's profiles, and removes what else is there. Returns
    them; those of several ranks have numbers, in the order of their names."""
    suffixes = (".json.gz", ".pickle")
    files = sorted(file for file in written.rglob("*") if file.name.endswith(suffixes))
    found: list[Path] = []
    for number, file in enumerate(files):
        suffix = next(each for each in suffixes if file.name.endswith(each))
        rank = f"_rank_{number}" if len(files) > 1 else ""
        target = request.stem.with_name(f"{request.name}{rank}{suffix}")
        shutil.move(file, target)
        found.append(target)
    shutil.rmtree(written, ignore_errors=True)
    return found
