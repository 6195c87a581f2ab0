"""A process that has imported what several workers need, and forks them: `python -m rlframe.cluster.template FD MODULE
...`.

On a machine without GPUs, imports are most of a short run's start, and each worker does the same ones. The template
does them once, beside the driver's own work. A Ray that is started meanwhile starts workers by a launcher, which asks
the template for a fork. Whatever else Ray starts with it, and every worker if the template is gone, begins as a fresh
interpreter.
"""

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlframe.cluster.environment import FOR_WORKERS

PROGRAM = "default_worker.py"
"""Ray's program of a worker. One with an environment of its own has another one before it, and begins afresh."""
RAYS = "thirdparty_files"
"""Name of the folder of packages that Ray has copies of."""
END_S = 15.0
"""Seconds that a killed process may take to end."""
KEEPING_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}
"""Settings of glibc's allocator, which it reads when a program starts, so that forks have them. A tensor of megabytes
takes the place of the last one. Otherwise its pages go back to the system and come back as zeros for the next one,
which is a tenth of the seconds of the main job's training. Arenas of further threads do so whatever the thresholds are,
so that there is one arena."""
STREAMS = 3
"""Standard input, output and error."""
LAUNCHER = """
import json, os, socket, sys
from array import array
asked = b""
if sys.argv[1:] and sys.argv[1].endswith("/{program}"):
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect({address!r})
            template.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", range({streams})))])
            template.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
            template.shutdown(socket.SHUT_WR)
            asked = template.recv(1)
    except OSError:
        pass
if not asked:
    os.execv({interpreter!r}, [{interpreter!r}, *sys.argv[1:]])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A template that has begun to import, and that nobody has asked for yet."""

    modules: tuple[str, ...]
    path: list[str]
    launcher: str | None
    stack: ExitStack
    """Ends the template when it is closed."""


class _Present:
    """The templates of this process."""

    launcher: str | None = None
    """Path of the launcher of the template that is asked for workers."""
    ahead: _Begun | None = None
    """The template that a later `imported` may take over."""


@contextmanager
def ahead(modules: Sequence[str]) -> Iterator[None]:
    """Begins a template now, inside the `with` block, which a later `imported` of the same modules takes over."""
    path = _path()
    with ExitStack() as stack:
        launcher = stack.enter_context(_running(modules))
        _Present.ahead = _Begun(modules=tuple(modules), path=path, launcher=launcher, stack=stack)
        try:
            yield
        finally:
            _Present.ahead = None


@contextmanager
def imported(modules: Sequence[str]) -> Iterator[None]:
    """Has a template inside the `with` block that imports `modules`, from now on or since it was begun `ahead`. None of
    them may start a thread."""
    begun, _Present.ahead = _Present.ahead, None
    with ExitStack() as stack:
        if begun is not None and (begun.modules, begun.path) == (tuple(modules), _path()):
            stack.push(begun.stack.pop_all())
            _Present.launcher = begun.launcher
        else:
            if begun is not None:
                # It imports from other folders than the program does by now.
                begun.stack.close()
            _Present.launcher = stack.enter_context(_running(modules))
        try:
            yield
        finally:
            _Present.launcher = None


@contextmanager
def _running(modules: Sequence[str]) -> Iterator[str | None]:
    """Runs a template inside the `with` block. Yields the path of its launcher, or None if it cannot be asked."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/template"
        try:
            listener.bind(address)
        except OSError:
            # The path of the system's folder for temporary files is too long for a socket.
            yield None
            return
        listener.listen()
        launcher = written(folder, address)
        template = subprocess.Popen(
            [sys.executable, "-m", "rlframe.cluster.template", str(listener.fileno()), *modules],
            env=KEEPING_MEMORY | os.environ | FOR_WORKERS | {"PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            # Neither Ctrl-C nor a signal to the run's process group reaches it, as Ray's own processes.
            start_new_session=True,
        )
        # A launcher learns that the template is gone, because nobody else keeps the socket.
        listener.close()
        try:
            # Programs in that folder may be forbidden.
            yield launcher if os.access(launcher, os.X_OK) else None
        finally:
            template.kill()
            template.wait(END_S)
            assert template.stdin
            template.stdin.close()


def _path() -> list[str]:
    """Returns the folders that modules are imported from, without Ray's own, which Ray adds wherever it is imported."""
    return [folder for folder in sys.path if Path(folder).name != RAYS]


def written(folder: str, address: str) -> str:
    """Writes the launcher, and returns its path. Ray starts it as it would start the interpreter."""
    source, path = Path(folder) / "launcher.py", Path(folder) / "launcher"
    values = {"program": PROGRAM, "address": address, "streams": STREAMS, "interpreter": sys.executable}
    source.write_text(LAUNCHER.format(**values))
    # A line `#!` with the interpreter's own path may be too long for the system.
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(source))} "$@"\n')
    path.chmod(0o700)
    return str(path)


@contextmanager
def forking() -> Iterator[None]:
    """Has a Ray that is started inside the `with` block ask the template for its workers, if there is one."""
    before = sys.executable
    sys.executable = _Present.launcher or before
    try:
        yield
    finally:
        sys.executable = before


def main() -> None:
    """Imports the modules, and forks a worker for each request until standard input ends."""
    listener, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        # A fork of a process with threads may hang. Without a template, workers begin afresh.
        return
    # Nobody waits for the workers here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            _, streams, _, _ = socket.recv_fds(connection, 1, STREAMS)
            with connection.makefile("rb") as file:
                asked = file.read()
            # Whoever asks may be killed while it does.
            if asked.endswith(b"]"):
                connection.send(b".")
                if os.fork() == 0:
                    connection.close()
                    listener.close()
                    arguments, environment, place = json.loads(asked)
                    return work(arguments, environment, place, streams)
        for stream in streams:
            os.close(stream)


def begin(environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """Gives this process, a fork, the standard streams, the environment and the folder of the process that it stands
    for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def work(arguments: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """Does in a new process what an interpreter does that starts with these arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Workaround for Ray 2.60, which ends the whole process group of a worker that dies: in the template's that would be
    # all workers. Not needed any more once its raylet.out has no "sending SIGKILL to pgid" after a worker's death.
    os.setpgid(0, 0)
    begin(environment, folder, streams)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
