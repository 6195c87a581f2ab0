"""A process of multiprocessing whose interpreter starts before it is known what the process does.

A library that spawns a process when it has made its own preparations has that process begin with the same imports: one
after the other. The interpreter of an `EarlyProcess` imports at once, beside its parent, and waits. What the library
then starts is sent there, as multiprocessing sends it to a new interpreter. Nothing is forked: threads and CUDA are as
untouched as there.
"""

import fcntl
import io
import os
import select
import sys
import termios
from contextlib import suppress
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import Any


class EarlyProcess:
    """An interpreter that waits for a process object. It ends if this object or the present process does, and nothing
    was sent."""

    def __init__(self, first: str):
        """Starts it with the present environment.

        Args:
            first: Python that it runs meanwhile, such as imports.
        """
        tracker = resource_tracker.getfd()
        ends, child_ends = os.pipe()
        child_reads, data = os.pipe()
        # The program is the last argument but one; after it comes multiprocessing's own mark.
        *options, program, mark = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_reads)
        wait = f"from {__name__} import wait; wait({child_reads})"
        program = f"import sys; sys.path[:] = {sys.path!r}; {first}; {wait}; {program}"
        self.executable = spawn.get_executable()
        try:
            passed = [tracker, child_reads, child_ends]
            self.pid = util.spawnv_passfds(os.fsencode(self.executable), [*options, program, mark], passed)
        finally:
            os.close(child_reads)
            os.close(child_ends)
        # Files, which are closed with this object.
        self.data, self.ends = os.fdopen(data, "wb"), os.fdopen(ends, "rb")
        self.used = False
        """Whether a process object has been sent there."""

    def can_take(self) -> bool:
        """Returns whether it waits, or soon will, and is the interpreter that multiprocessing would start now. vLLM
        wraps that one to bind a process to the cores of a NUMA node."""
        alive = not select.select([self.ends], [], [], 0)[0]
        return not self.used and alive and spawn.get_executable() == self.executable

    def context(self) -> "EarlyContext":
        """Returns a context of multiprocessing whose first process runs in this one."""
        return EarlyContext(self)


class EarlyContext(SpawnContext):
    """`spawn`, with one interpreter started early."""

    def __init__(self, early: EarlyProcess):
        super().__init__()
        self._early = early

    def Process(self, *arguments: Any, **named: Any) -> "LateProcess":  # noqa: N802 - multiprocessing's name
        """Returns a process that is sent to the early one, or spawned where that cannot take it."""
        process = LateProcess(*arguments, **named)
        process.early = self._early
        return process


class LateProcess(SpawnProcess):
    """A process object that runs in an early process, with the environment that its parent has when it starts it."""

    early: EarlyProcess | None = None
    environment: dict[str, str] | None = None

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 - multiprocessing's name
        early, process_obj.early = process_obj.early, None
        if early is None or not early.can_take():
            return Popen(process_obj)
        process_obj.environment = dict(os.environ)
        return Sent(process_obj, early)

    def run(self) -> None:
        """Runs what the process is for, in that environment."""
        if self.environment is not None:
            # Only what differs: setproctitle finds the memory of this process's title by the environment's first entry.
            for name in os.environ.keys() - self.environment.keys():
                del os.environ[name]
            for name, value in self.environment.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value
        super().run()


class Sent(Popen):
    """The handle of a process object that is sent to an early interpreter, or spawned if it cannot be."""

    def __init__(self, process_obj: LateProcess, early: EarlyProcess):
        self._early = early
        super().__init__(process_obj)

    def _launch(self, process_obj: LateProcess) -> None:
        message = self._pickled(process_obj)
        if self._fds:
            # Files, which an interpreter that runs already cannot inherit.
            self._fds = []
            super()._launch(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            return
        early = self._early
        early.used = True
        self.pid, self.sentinel = early.pid, os.dup(early.ends.fileno())
        # The process sees from the other end of this one that its parent lives.
        self.finalizer = util.Finalize(self, close_files, (os.dup(early.data.fileno()), self.sentinel))
        with suppress(BrokenPipeError):
            # If it has ended, its sentinel says so.
            early.data.write(message)
            early.data.flush()

    def _pickled(self, process_obj: LateProcess) -> bytes:
        """Returns what a spawned interpreter reads first: how to prepare itself, and the process object."""
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        return message.getvalue()


def close_files(*files: int) -> None:
    """Closes files by their numbers."""
    for file in files:
        os.close(file)


def wait(pipe: int) -> None:
    """Waits until something comes through `pipe`. Ends this process if nothing can come any more."""
    select.select([pipe], [], [])
    if not any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
        sys.exit(0)
