"""Moments at which a program waits for its test, so that neither can be too late for the other.

A moment is `step 3`, once metrics.jsonl has that step, or `checkpoint 4`, once a rank has written its file of it and
nobody has sealed them. The program waits as long as the folder named by FOLDER has a file of the moment's name. Every
process of a forked program waits. Of a fresh one, which `python -m tests.multiprocess.held MODULE ARGUMENTS` starts,
only the driver does, for steps.
"""

import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlframe.loops.callbacks import Callbacks
from rlframe.utils.files import whole
from tests.until import until

FOLDER = "RLFRAME_TESTS_HELD"
FILE_OF_A_RANK = re.compile(r"/\.partial-[^/]*-step-0*(\d+)/training/[^/]+$")


def wait(moment: str) -> None:
    """Returns when nobody holds the moment."""
    until(lambda: not (Path(os.environ[FOLDER]) / moment).exists(), what=f"somebody lets {moment} go on")


def install() -> None:
    """Has this process wait at the moments. Whatever writes checkpoints must not be imported yet."""
    on_step, writing = Callbacks.on_step, whole.writing

    def held_step(self: Callbacks, step: int, metrics: Mapping[str, float]) -> None:
        on_step(self, step, metrics)
        wait(f"step {step}")

    @contextmanager
    def held_writing(path: Path) -> Iterator[None]:
        with writing(path):
            yield
        if found := FILE_OF_A_RANK.search(str(path)):
            wait(f"checkpoint {found[1]}")

    Callbacks.on_step = held_step
    whole.writing = held_writing


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
