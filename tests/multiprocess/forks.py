"""Whole runs and Ray's workers as processes forked from a server that has imported what they need.

Each is new and shares nothing with another. A fresh process takes three CPU seconds for its imports, and a run has six
processes. What only a fresh one shows, that each kind of process imports what it needs and in which order, is shown by
the runs that begin with `fresh=True`.

Ray starts a worker by a command whose first word is the interpreter. Here that is a small program, the launcher, which
passes the rest on to a server and ends. The launcher executes every other command as it is.
"""

import atexit
import ctypes
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from rlframe.cluster import template
from rlframe.cluster.template import PROGRAM
from tests.multiprocess import held

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.cpp_extension",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "hydra",
    "rlframe.algorithms.grpo",
    "rlframe.config.load",
    "rlframe.models.checkpoint",
    "rlframe.rollout.transformers.engine",
    "rlframe.weight_sync.endpoints",
)
"""Not Megatron, before which a rank prepares torch in a way that engines do not bear; nor Ray, which reads the
environment when it is imported; nor Arrow, which starts a thread."""
STREAMS = 3
"""Standard input, output and error."""
SETUP = "setup_worker.py"
"""Ray's program that applies the environment of a worker, if it has one of its own, and then executes PROGRAM."""
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""Arguments of SETUP, after those of the worker's program."""
PATIENCE_S = 300.0
LAUNCHER = """#!{interpreter} -IS
import json, os, socket, sys
from array import array
if any(word.endswith(("/{setup}", "/{program}")) for word in sys.argv[1:3]):
    with socket.socket(socket.AF_UNIX) as server:
        server.connect({address!r})
        server.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", range({streams})))])
        server.sendall(json.dumps(["", sys.argv[1:], dict(os.environ), os.getcwd()]).encode())
        server.shutdown(socket.SHUT_WR)
        server.recv(1)
else:
    os.execv({interpreter!r}, [{interpreter!r}, *sys.argv[1:]])
"""
PR_SET_PDEATHSIG = 1


class Fork:
    """A module that runs as a program in a forked process; like `subprocess.Popen`."""

    def __init__(self, module: str, arguments: list[str], *, folder: Path, environment: dict[str, str], errors: int):
        """Starts it as `python -m` would, in `folder`, in a session of its own.

        Args:
            errors: file descriptor of its standard error. It has no standard output.
        """
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server())
        with open(os.devnull, "r+") as nowhere:
            socket.send_fds(self._connection, [b"."], [nowhere.fileno(), nowhere.fileno(), errors])
        self._connection.sendall(json.dumps([module, arguments, environment, str(folder)]).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self._said = self._connection.makefile("r")
        self.pid = int(self._said.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """See subprocess.Popen."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """See subprocess.Popen."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """See subprocess.Popen."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, seconds: float | None) -> int | None:
        poll = select.poll()  # select takes no descriptor above 1023
        poll.register(self._connection, select.POLLIN)
        if self.returncode is None and poll.poll(None if seconds is None else math.ceil(1e3 * seconds)):
            self.returncode = int(self._said.readline())
            self._connection.close()
        return self.returncode


@contextmanager
def forked_workers() -> Iterator[None]:
    """Has a Ray that is started inside the `with` block fork its workers, unless there are GPUs: a worker then chooses
    its own before it imports torch."""
    if torch.cuda.is_available():
        yield
        return
    before, sys.executable = sys.executable, launcher(server())
    try:
        with patch.object(template, "imported", no_template):
            yield
    finally:
        sys.executable = before


def no_template(_: Sequence[str]) -> AbstractContextManager[None]:
    """Stands for the run's own template where its workers are forked from here."""
    return nullcontext()


@cache
def server() -> str:
    """Starts the server of this process, if it has none; returns its address."""
    address = f"{tempfile.mkdtemp()}/server"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.multiprocess.forks", address],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
    )
    atexit.register(process.kill)
    deadline = time.monotonic() + PATIENCE_S
    while not os.path.exists(address):
        assert process.poll() is None and time.monotonic() < deadline, "the server of forks has not begun"
        time.sleep(0.02)
    return address


def launcher(address: str) -> str:
    """Writes the launcher beside the server's address, and returns its path."""
    path = Path(f"{address}.launcher")
    values = {"interpreter": sys.executable, "setup": SETUP, "program": PROGRAM, "streams": STREAMS}
    path.write_text(LAUNCHER.format(address=address, **values))
    path.chmod(0o700)
    return str(path)


def main() -> None:
    """Imports, and forks what is asked for at the address in the first argument until standard input ends."""
    # Megatron and transformers warn of every package that is not installed.
    with warnings.catch_warnings(action="ignore"):
        for module in IMPORTED:
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    serve(listening(sys.argv[1]), until=sys.stdin.fileno())


def listening(address: str) -> socket.socket:
    """Returns a socket that listens at the address."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    # Whoever waits for the address may connect at once.
    os.rename(f"{address}.new", address)
    return listener


def serve(listener: socket.socket, *, until: int | None = None) -> None:
    """Forks a process for each request until the file descriptor `until` is at its end."""
    # Nobody waits for the workers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, *([] if until is None else [until])], [], [])
        if until in ready:
            return
        connection, _ = listener.accept()
        _, handles, _, _ = socket.recv_fds(connection, 1, STREAMS)
        with connection.makefile("rb") as file:
            asked = file.read()
        # Whoever asks may be killed while it does.
        module, *request = json.loads(asked) if asked.endswith(b"]") else [None]
        if module is not None and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            if module:
                _watch(connection, module, *request, handles)
            connection.close()
            _leave_by(_work, *request, handles)
        connection.close()
        for handle in handles:
            os.close(handle)


def _watch(
    connection: socket.socket,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    handles: list[int],
) -> NoReturn:
    """Forks a program, and says its pid and then its exit code."""
    pid = os.fork()
    if pid == 0:
        connection.close()
        _leave_by(_program, module, arguments, environment, folder, handles)
    for handle in handles:
        os.close(handle)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _program(module: str, arguments: list[str], environment: dict[str, str], folder: str, handles: list[int]) -> None:
    """Runs a module as a program that forks its Ray's workers from a server of its own, which is under it."""
    os.setsid()
    _begin(environment, folder, handles)
    address = f"{tempfile.mkdtemp()}/server"
    listener = listening(address)
    if os.fork() == 0:
        # With the program the server ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(listener)
    listener.close()
    sys.executable = launcher(address)
    template.imported = no_template
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _work(arguments: list[str], environment: dict[str, str], folder: str, handles: list[int]) -> None:
    """Is a worker of Ray: does what SETUP does, then PROGRAM."""
    context = next((word for word in arguments if word.startswith(CONTEXT)), "").removeprefix(CONTEXT)
    first = next(index for index, word in enumerate(arguments) if word.endswith(".py") and not word.endswith(SETUP))
    _begin(environment | json.loads(context or "{}").get("env_vars", {}), folder, handles)
    sys.argv = [word for word in arguments[first:] if not word.startswith((CONTEXT, LANGUAGE))]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _begin(environment: dict[str, str], folder: str, handles: list[int]) -> None:
    template.begin(environment, folder, handles)
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    if held.FOLDER in environment:
        held.install()


def _leave_by(function: Callable[..., None], *arguments: Any) -> NoReturn:
    """Calls the function and ends the process as an interpreter would."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
