"""Recorders of processes that compute with torch. A process imports this file when its first profile begins."""

import pathlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from rlframe.cluster.profiling.config import Tool
from rlframe.cluster.profiling.request import Recorder, Request
from rlframe.cluster.profiling.stacks import StackRecorder

MOST_ALLOCATIONS = 1_000_000
"""Number of allocations that a memory snapshot remembers, the latest ones."""


class TorchRecorder:
    """A trace of all threads by torch.profiler."""

    def __init__(self, request: Request):
        self._request = request
        # A process that does not use its GPU begins none for the sake of a profile.
        uses_gpu = torch.cuda.is_initialized()
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if uses_gpu else [])],
            with_stack=request.stacks,
            # Collectives of a CPU, and engines, compute in threads of their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

        self._records = False

    def begin(self) -> None:
        self._records = True
        self._profile.start()

    def end(self) -> list[pathlib.Path]:
        self.drop()
        file = self._request.stem.with_suffix(".json.gz")
        self._profile.export_chrome_trace(str(file))
        return [file]

    def drop(self) -> None:
        # torch refuses to stop twice, as after a file that could not be written.
        if self._records:
            self._records = False
            self._profile.stop()

    def range(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)


class NsysRecorder:
    """A report of nsys, under which the process has been started; it waits for the CUDA profiler to begin."""

    def begin(self) -> None:
        torch.cuda.profiler.start()

    def end(self) -> list[pathlib.Path]:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return []

    def drop(self) -> None:
        self.end()

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)


class MemoryRecorder:
    """A snapshot of torch's allocations on the GPU, and of what has led to it."""

    def __init__(self, request: Request):
        self._request, self._memory = request, torch.cuda.memory

    def begin(self) -> None:
        self._memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def end(self) -> list[pathlib.Path]:
        file = self._request.stem.with_suffix(".pickle")
        try:
            self._memory._dump_snapshot(str(file))
        finally:
            # Whoever ends a record does not come back to drop it.
            self.drop()
        return [file]

    def drop(self) -> None:
        self._memory._record_memory_history(enabled=None)

    def range(self, name: str) -> AbstractContextManager[Any]:  # noqa: ARG002 - a snapshot has no ranges
        return nullcontext()


class Together:
    """Several recorders as one."""

    def __init__(self, recorders: Sequence[Recorder]):
        self._recorders = recorders

    def begin(self) -> None:
        for each in self._recorders:
            each.begin()

    def end(self) -> list[pathlib.Path]:
        return [file for each in reversed(self._recorders) for file in each.end()]

    def drop(self) -> None:
        for each in reversed(self._recorders):
            each.drop()

    def range(self, name: str) -> AbstractContextManager[Any]:
        with ExitStack() as stack:
            for each in self._recorders:
                stack.enter_context(each.range(name))
            return stack.pop_all()


def driver_recorder(request: Request) -> Recorder:
    """Returns what records the driver: its phases, its waits and its operators in a trace, and the stacks of its main
    thread."""
    return Together([TorchRecorder(request), StackRecorder(request, thread="MainThread")])


def recorder(request: Request) -> Recorder:
    """Returns what records a process that computes with torch."""
    match request.tool:
        case Tool.TORCH:
            return TorchRecorder(request)
        case Tool.NSYS:
            return NsysRecorder()
        case Tool.MEMORY:
            return MemoryRecorder(request)
