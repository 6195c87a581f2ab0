"""Samples the Python stacks of a thread of this process, from a thread of its own.

cProfile measures every call, but from Python 3.12 on it mixes the threads of a process up: a function of one thread is
charged with the time of another. A sampler looks at one thread, costs the same however many calls there are, and its
file is small.
"""

import pathlib
import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from rlframe.cluster.profiling.request import Request

EVERY_S = 0.01
"""Seconds between two samples."""
END_S = 10.0
"""Seconds that the last sample may take."""
MOST_FRAMES = 200
"""Greatest depth of a stack that is kept; the frames nearest to the work."""


class StackSampler:
    """Counts the stacks of one thread."""

    def __init__(self, thread: str) -> None:
        """
        Args:
            thread: name of the thread.
        """
        self.counts: Counter[tuple[str, ...]] = Counter()
        """Number of samples of each stack: its functions, the outermost first."""
        self._ident = next((each.ident for each in threading.enumerate() if each.name == thread), None)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stack sampler", daemon=True)

    def start(self) -> None:
        """Begins to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the samples."""
        self._ended.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            if frame := sys._current_frames().get(self._ident or 0):
                self.counts[tuple(functions(frame))] += 1

    def write(self, file: pathlib.Path) -> None:
        """Writes the stacks as lines `outer;inner COUNT`, the most frequent first."""
        lines = (f"{';'.join(stack)} {count}\n" for stack, count in self.counts.most_common())
        file.write_text("".join(lines), encoding="utf-8")


class StackRecorder:
    """Python stacks of one thread of the process, sampled."""

    def __init__(self, request: Request, *, thread: str):
        self._request, self.sampler = request, StackSampler(thread)

    def begin(self) -> None:
        self.sampler.start()

    def end(self) -> list[pathlib.Path]:
        self.sampler.stop()
        file = self._request.stem.with_suffix(".folded.txt")
        self.sampler.write(file)
        return [file]

    def drop(self) -> None:
        self.sampler.stop()

    def range(self, name: str) -> AbstractContextManager[Any]:  # noqa: ARG002 - samples have no ranges
        return nullcontext()


def functions(frame: FrameType | None) -> list[str]:
    """Returns the functions of a stack, the outermost first, as `file.py:function`."""
    found: list[str] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        found.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_qualname}".replace(";", ","))
        frame = frame.f_back
    return found[::-1]
