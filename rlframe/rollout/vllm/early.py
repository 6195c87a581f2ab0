"""The process of vLLM's core, started before vLLM asks for it.

vLLM makes its configuration and then starts a new interpreter for its core (`spawn`), which begins with the same import
of vLLM: 15 s after 15 s on a machine with an H200. `EarlyProcess` starts that interpreter at once. It imports vLLM
while its parent does, and waits. What vLLM then starts is sent there, as multiprocessing sends it to an interpreter of
its own. Nothing is forked, and CUDA is as untouched as in a new process.
"""

import fcntl
import io
import os
import select
import sys
import termios
from contextlib import suppress
from importlib import import_module
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from pathlib import Path
from typing import Any

CORE = ("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "rlframe.rollout.vllm.worker")
MODULES = {
    True: (*CORE, "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"),
    False: (*CORE, "vllm.v1.worker.cpu_worker"),
}
"""What the core imports, by whether it runs on CUDA."""


class EarlyProcess:
    """An interpreter that imports vLLM and then waits for what it has to do. It ends if this object or its process
    does, and nothing was sent."""

    def __init__(self, folder: Path, *, cuda: bool):
        """Starts it with the environment that the present process has.

        Args:
            folder: the model, whose class is imported too.
        """
        tracker = resource_tracker.getfd()
        ends, child_ends = os.pipe()
        child_reads, data = os.pipe()
        *options, program, mark = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_reads)
        first = f"from {__name__} import begin; begin({str(folder)!r}, cuda={cuda}, pipe={child_reads})"
        program = f"import sys; sys.path[:] = {sys.path!r}; {first}; {program}"
        self.executable = spawn.get_executable()
        passed = [tracker, child_reads, child_ends]
        try:
            self.pid = util.spawnv_passfds(self.executable, [*options, program, mark], passed)
        finally:
            os.close(child_reads)
            os.close(child_ends)
        # Files, which are closed with this object.
        self.data, self.ends = os.fdopen(data, "wb"), os.fdopen(ends, "rb")
        self.used = False
        """Whether vLLM's core has been sent there."""

    def can_take(self) -> bool:
        """Returns whether a process can be sent there that would be started with the present interpreter. vLLM wraps
        the interpreter to bind it to the cores of a NUMA node."""
        alive = not select.select([self.ends], [], [], 0)[0]
        return not self.used and alive and spawn.get_executable() == self.executable

    def context(self) -> "EarlyContext":
        """Returns a context of multiprocessing whose first process is this one."""
        return EarlyContext(self)


class EarlyContext(SpawnContext):
    """`spawn`, with one interpreter started early."""

    def __init__(self, early: EarlyProcess):
        super().__init__()
        self._early = early

    def Process(self, *arguments: Any, **named: Any) -> "CoreProcess":  # noqa: N802 - multiprocessing's name
        """Returns a process that is sent to the early one, or spawned where that cannot take it."""
        process = CoreProcess(*arguments, **named)
        process.early = self._early
        return process


class CoreProcess(SpawnProcess):
    """A process of multiprocessing with the environment of the moment at which it is started."""

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
            os.environ.clear()
            os.environ.update(self.environment)
        super().run()


class Sent(Popen):
    """The handle of a process object that was sent to an early interpreter."""

    def __init__(self, process_obj: CoreProcess, early: EarlyProcess):
        self._early = early
        super().__init__(process_obj)

    def _launch(self, process_obj: CoreProcess) -> None:
        message = self._pickled(process_obj)
        assert not self._fds, "vLLM passes files to its core, which an interpreter that runs already cannot inherit"
        early = self._early
        early.used = True
        self.pid, self.sentinel = early.pid, os.dup(early.ends.fileno())
        # The core sees from the other end of this one that its parent lives.
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(early.data.fileno()), self.sentinel))
        with suppress(BrokenPipeError):
            # If it has ended, vLLM sees that too.
            early.data.write(message)
            early.data.flush()

    def _pickled(self, process_obj: CoreProcess) -> bytes:
        """Returns what a spawned interpreter reads first: how to prepare itself, and the process object."""
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        return message.getvalue()


def begin(folder: str, *, cuda: bool, pipe: int) -> None:
    """Imports what vLLM's core needs, and waits for what it has to do. Ends this process if nothing comes any more."""
    from rlframe.rollout.vllm.launch import register_here  # noqa: PLC0415 - which imports this file

    for module in MODULES[cuda]:
        import_module(module)
    register_here(Path(folder))
    select.select([pipe], [], [])
    if not any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
        sys.exit(0)
