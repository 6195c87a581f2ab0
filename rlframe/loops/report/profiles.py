"""The profiles of a run's steps, as links."""

import os
import re
from pathlib import Path
from typing import Any

from rlframe.cluster.profiling.config import FOLDER

STEP = re.compile(r"step_(\d+)")


def profiles(output: Path, *, page: Path) -> list[dict[str, Any]]:
    """Returns the profiled steps, each with its files and their addresses for a page in the folder `page`."""
    steps = {int(match[1]): folder for folder in (output / FOLDER).glob("*") if (match := STEP.fullmatch(folder.name))}
    return [
        {
            "step": step,
            "files": [
                {"name": file.name, "address": Path(os.path.relpath(file, page)).as_posix()}
                for file in sorted(folder.iterdir(), key=lambda file: (file.name != "summary.md", file.name))
                if file.is_file()
            ],
        }
        for step, folder in sorted(steps.items())
    ]
