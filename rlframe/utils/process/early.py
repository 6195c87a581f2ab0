"""A process of multiprocessing whose interpreter starts before it is known what the process does.

A library that spawns a process when it has made its own preparations has that process begin with the same imports: one
after the other. The interpreter of an `EarlyProcess` imports at once, beside its parent, and waits. What the library
then starts is sent there, as multiprocessing sends it to a new interpreter. Nothing is forked: threads and CUDA are as
untouched as there.
"""

import importlib
import io
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import Any

FIRST_FILE, MOST_FILES = 200, 16
"""Number of the first file that comes with a process object, above those that an interpreter opens for imports, and the
greatest number of such files."""


STARTED: list["EarlyProcess"] = []
"""The early processes that this process, if it is one itself, has started below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyProgram:
    """The program of an early process, so that one process can decide on it and another start it."""

    first: str
    """Python that it runs while it waits, such as imports."""
    below: tuple[str, ...] = ()
    """Programs of further early processes, which it starts before it runs `first`. They are in its `STARTED`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it and its parent need."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Others, where they have no value yet."""

    def start(self) -> "EarlyProcess":
        """Sets the variables in this process, and starts an early process."""
        for name, value in self.defaults.items():
            os.environ.setdefault(name, value)
        os.environ.update(self.environment)
        return EarlyProcess(self.first, below=self.below)


class EarlyProcess:
    """An interpreter that waits for a process object. It ends if this object or the present process does, and nothing
    was sent."""

    def __init__(self, first: str, *, below: Sequence[str] = ()):
        """Starts it with the present environment.

        Args:
            first, below: see EarlyProgram.
        """
        tracker = tracker_apart()
        ends, child_ends = os.pipe()
        self.channel, child = socket.socketpair()
        child_reads = child.fileno()
        # The program is the last argument but one; after it comes multiprocessing's own mark.
        *options, program, mark = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_reads)
        known = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import begin, wait"
        known = f"{known}; begin({tracker}, {tuple(below)!r})"
        program = f"{known}; {first}; wait({child_reads}); {program}"
        self.executable = spawn.get_executable()
        try:
            passed = [tracker, child_reads, child_ends]
            self.pid = util.spawnv_passfds(os.fsencode(self.executable), [*options, program, mark], passed)
        finally:
            child.close()
            os.close(child_ends)
        # A file, which is closed with this object, as the channel is.
        self.ends = os.fdopen(ends, "rb")
        self.used = False
        """Whether a process object has been sent there."""

    def can_take(self) -> bool:
        """Returns whether it waits, or soon will, and is the interpreter that multiprocessing would start now. vLLM
        wraps that one to bind a process to the cores of a NUMA node."""
        alive = not select.select([self.ends], [], [], 0)[0]
        return not self.used and alive and spawn.get_executable() == self.executable

    def context(self) -> "EarlyContext":
        """Returns a context of multiprocessing whose first process runs in this one."""
        return EarlyContext([self])


class EarlyContext(SpawnContext):
    """`spawn`, with some interpreters started early."""

    def __init__(self, early: Sequence[EarlyProcess]):
        super().__init__()
        self._early = early

    def Process(self, *arguments: Any, **named: Any) -> "LateProcess":  # noqa: N802 - multiprocessing's name
        """Returns a process that is sent to the first early one that can take it, or spawned where none can."""
        process = LateProcess(*arguments, **named)
        process.early = self._early
        return process


class LateProcess(SpawnProcess):
    """A process object that runs in an early process, with the environment that its parent has when it starts it."""

    early: Sequence[EarlyProcess] = ()
    environment: dict[str, str] | None = None

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 - multiprocessing's name
        early = next((each for each in process_obj.early if each.can_take()), None)
        process_obj.early = ()
        if early is None:
            return Popen(process_obj)
        process_obj.environment = dict(os.environ)
        return Sent(process_obj, early)

    def run(self) -> None:
        """Runs what the process is for, in that environment."""
        if self.environment is not None:
            for name in os.environ.keys() - self.environment.keys():
                del os.environ[name]
            for name, value in self.environment.items():
                if os.environ.get(name) != value:
                    os.environ[name] = value
        super().run()


class Sent(Popen):
    """The handle of a process object that is sent to an early interpreter, or spawned if it cannot be."""

    def __init__(self, process_obj: LateProcess, early: EarlyProcess):
        self._early: EarlyProcess | None = early
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        """Returns the number that a file of this process will have in the other one."""
        number: int = super().duplicate_for_child(fd)
        return number if self._early is None else FIRST_FILE + len(self._fds) - 1

    def _launch(self, process_obj: LateProcess) -> None:
        message, early = self._pickled(process_obj), self._early
        assert early is not None
        if len(self._fds) > MOST_FILES:
            self._fds, self._early = [], None
            super()._launch(process_obj)  # pyright: ignore[reportAttributeAccessIssue]
            return
        early.used = True
        self.pid, self.sentinel = early.pid, os.dup(early.ends.fileno())
        # The process sees from the other end of this one that its parent lives.
        self.finalizer = util.Finalize(self, close_files, (os.dup(early.channel.fileno()), self.sentinel))
        with suppress(BrokenPipeError, ConnectionResetError):
            # If it has ended, its sentinel says so.
            socket.send_fds(early.channel, [b"."], self._fds)
            early.channel.sendall(message)

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


def tracker_apart() -> int:
    """Returns the file of multiprocessing's tracker of resources, started in a process group of its own unless it runs.

    Workaround for Ray 2.60, which kills the group of a worker that ends: a tracker in it would leave what it tracks in
    /dev/shm. Not needed any more once a run with vLLM leaves nothing there without it.
    """
    start = util.spawnv_passfds
    util.spawnv_passfds = _spawned_apart
    try:
        file = resource_tracker.getfd()
    finally:
        util.spawnv_passfds = start
    assert file is not None, "it runs now"
    return file


def _spawned_apart(path: bytes | str, arguments: Sequence[str], files: Sequence[int]) -> int:
    process = subprocess.Popen(arguments, executable=path, pass_fds=files, process_group=0)
    # It is multiprocessing that waits for it.
    process.returncode = 0
    return process.pid


def close_files(*files: int) -> None:
    """Closes files by their numbers."""
    for file in files:
        os.close(file)


def begin(tracker: int, below: Sequence[str]) -> None:
    """Prepares this process before it imports anything else, and starts the early processes below it.

    Processes that it starts before `spawn_main` use its parent's tracker of resources too. setproctitle, where it is
    installed, finds the memory of the title by the first variable of the environment, and would set no title any more
    after a change of that variable. Ray's workers have their variables in random order, so that it may be any.
    """
    resource_tracker._resource_tracker._fd = tracker  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(ImportError):
        importlib.import_module("setproctitle").getproctitle()
    STARTED.extend(map(EarlyProcess, below))


def wait(channel: int) -> None:
    """Waits until a process object comes through `channel`, and opens the files that it needs by their numbers. Ends
    this process if nothing can come any more."""
    with socket.socket(fileno=os.dup(channel)) as end:
        begun, files, _, _ = socket.recv_fds(end, 1, MOST_FILES)
    if not begun:
        sys.exit(0)
    for number, file in enumerate(files, FIRST_FILE):
        assert not os.path.exists(f"/proc/self/fd/{number}"), f"file {number} is not open yet"
        os.dup2(file, number)
        os.close(file)
