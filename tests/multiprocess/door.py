"""`python -m rlframe.main` without most of its imports: a process forked from the template of all ranks runs it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from tests.multiprocess.distributed import template

PATIENCE_S = 120.0
AWAITED = re.compile(r"^starting for \d+ s: .*\n", re.MULTILINE)
"""A line of `rlframe.utils.process.telling`."""


def rlframe(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What the program says when it is started in `folder`. Whole runs are processes of their own: see `program`."""
    files = [folder.parent / f"{folder.name}.{stream}" for stream in ("stdout", "stderr")]
    process = template().Process(target=_run, args=(folder, files, arguments, {**os.environ, **(environment or {})}))
    process.start()
    process.join(PATIENCE_S)
    process.kill()
    process.join()
    # A busy machine is told of what it waits for.
    said = [AWAITED.sub("", file.read_text(encoding="utf-8")) for file in files]
    return subprocess.CompletedProcess(arguments, process.exitcode, *said)


def _run(folder: Path, files: list[Path], arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["rlframe.main", *arguments]
    runpy.run_module("rlframe.main", run_name="__main__", alter_sys=True)
