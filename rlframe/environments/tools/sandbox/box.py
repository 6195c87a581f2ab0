"""Chooses how a program is shut in, and proves that it works before anything depends on it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlframe.environments.tools.sandbox import filter, inside
from rlframe.environments.tools.sandbox.limits import DidNotStart, Ended, Limits
from rlframe.environments.tools.sandbox.running import END_TIMEOUT_S, FOLDER, HOME, Running

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of the root that hold programs and libraries. On most systems they are links into /usr."""
CONFIGURATION = ("/etc/ld.so.cache", "/etc/alternatives")
"""Files of /etc that the loader of libraries needs."""
DEVICES = ("null", "zero", "full", "random", "urandom")
USERS = range(60578, 61184)
"""User ids that no system gives to anybody, for sandboxes that root makes; see systemd's `UIDS-GIDS.md`."""
ASK_TIMEOUT_S = 30.0


class Kind(StrEnum):
    """Ways to shut a program in."""

    BUBBLEWRAP = "bubblewrap"
    """By namespaces, without network and without other files."""
    PROCESS = "process"
    """Not at all: a plain process with limits. It can read and write what its user can, use the network, and end all
    other processes of that user. What leaves its process group may survive it. Root gives it another user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A Python interpreter, and the folders that it needs."""

    path: str
    folders: tuple[str, ...]

    @classmethod
    def of(cls, path: str | None) -> "Interpreter":
        """Returns the interpreter at a path; None means the one that runs.

        Raises:
            DidNotStart: it is no interpreter.
        """
        ask = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix]))"
        try:
            asked = subprocess.run(
                [path or sys.executable, "-I", "-c", ask],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ASK_TIMEOUT_S,
                check=True,
            )
            found, *prefixes = json.loads(asked.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise DidNotStart(f"{path or sys.executable} is no Python interpreter: {error}") from None
        needed = {*prefixes, *map(os.path.realpath, prefixes), os.path.dirname(os.path.realpath(found))}
        return cls(path=found, folders=tuple(sorted(each for each in needed if not _is_system(each))))


class Box:
    """Runs code, each time in a new sandbox."""

    def __init__(self, kind: Kind, limits: Limits, *, interpreter: str | None = None, readable: Sequence[str] = ()):
        """
        Args:
            interpreter: path of a Python interpreter; None means the one that runs.
            readable: further files and folders that programs can read.

        Raises:
            DidNotStart: the sandbox does not work here; the message gives the reason.
        """
        self._kind, self._limits, self._readable = kind, limits, readable
        self._interpreter = Interpreter.of(interpreter)
        self._program = Path(inside.__file__).read_text(encoding="utf-8")
        self._filter = b""
        # Root's namespaces would hold root's processes, on which the kernel has no limit of number; and a plain process
        # of root could end every other one.
        self._as_root = os.geteuid() == 0
        self._user = 0
        if kind is Kind.BUBBLEWRAP:
            self._bubblewrap = shutil.which("bwrap")
            if self._bubblewrap is None:
                raise DidNotStart("bubblewrap is not installed")
            if (machine := filter.machine()) is None:
                raise DidNotStart("there is no list of system calls for this kind of processor")
            self._filter = filter.program(machine)

    def prove(self) -> None:
        """Runs a program that needs nothing, and looks at its output.

        Raises:
            DidNotStart: there is none.
        """
        # In a thread of its own, because this one may have an event loop.
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(asyncio.run, self.run("import decimal, subprocess\n6 * 7"))
            ended = running.result(timeout=self._limits.timeout_s + END_TIMEOUT_S)
        if (ended.output, ended.exit_code) != ("42\n", 0):
            why = ended.stopped or ended.output[-300:] or f"exit code {ended.exit_code}"
            raise DidNotStart(f"a first program failed: {why.strip()}")

    async def run(self, code: str) -> Ended:
        """Runs code to its end, or to the first limit that it reaches.

        Raises:
            DidNotStart: the sandbox failed before the code began.
        """
        user = self._next_user() if self._as_root else None
        with self._folder(user) as folder, self._filtered() as descriptors:
            command = self._command(user, descriptors)
            running = Running(command, self._limits, folder=folder, descriptors=descriptors)
            return await running.finish(code)

    @contextmanager
    def _folder(self, user: int | None) -> Iterator[str]:
        """Yields an empty folder. That of bubblewrap lies in memory, and no other process sees it."""
        if self._kind is Kind.BUBBLEWRAP:
            yield "/"
            return
        folder = tempfile.mkdtemp(prefix="rlframe-code-")
        try:
            if user is not None:
                os.chown(folder, user, user)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _filtered(self) -> Iterator[tuple[int, ...]]:
        if not self._filter:
            yield ()
            return
        descriptor = filter.opened(self._filter)
        try:
            yield (descriptor,)
        finally:
            os.close(descriptor)

    def _command(self, user: int | None, descriptors: Sequence[int]) -> list[str]:
        limits = self._limits
        settings = {
            "user": user,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": limits.cpu_s,
            "file_bytes": limits.file_bytes,
            # Without a user id or a namespace of its own, the kernel counts all processes of the user.
            "processes": limits.processes if self._kind is Kind.BUBBLEWRAP or self._as_root else None,
        }
        python = [self._interpreter.path, "-I", "-B", "-X", "utf8", "-c", self._program, json.dumps(settings)]
        if self._kind is Kind.PROCESS:
            return python
        return [*self._shut_in(descriptors[0]), "--", *python]

    def _next_user(self) -> int:
        """Returns another user id than those of the sandboxes before, so that each has its own count of processes."""
        self._user += 1
        return USERS[(os.getpid() + self._user) % len(USERS)]

    def _shut_in(self, descriptor: int) -> list[str]:
        """Returns the command that makes a sandbox, up to the program in it."""
        assert self._bubblewrap is not None
        command = [self._bubblewrap, "--die-with-parent", "--new-session", "--clearenv", "--seccomp", str(descriptor)]
        command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        if self._as_root:
            # `inside` needs these to become another user, which ends them.
            command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--uid", str(USERS[0]), "--gid", str(USERS[0])]
        command += ["--ro-bind", "/usr", "/usr"]
        # Before what is bound, which may lie in a folder of that name, as a virtual environment of a build does.
        command += ["--perms", "0777", "--size", str(self._limits.file_bytes), "--tmpfs", FOLDER]
        bound = (*self._interpreter.folders, *self._readable)
        # Bubblewrap would make them for its own user only.
        for path in sorted({"/dev", "/etc", *(str(parent) for each in bound for parent in Path(each).parents)} - {"/"}):
            command += [] if _is_system(path) else ["--perms", "0755", "--dir", path]
        for path in (f"/{name}" for name in SYSTEM):
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                command += ["--ro-bind", path, path]
        for path in CONFIGURATION:
            command += ["--ro-bind-try", path, path]
        for path in bound:
            command += ["--ro-bind", path, path]
        command += ["--proc", "/proc"]
        for name in DEVICES:
            command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        command += ["--symlink", FOLDER, "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd"]
        command += ["--perms", "0777", "--dir", HOME]
        command += ["--remount-ro", "/", "--chdir", HOME, "--setenv", "HOME", HOME]
        # Libraries of algebra start a thread a core when they are imported, and fail where they cannot.
        return [*command, "--setenv", "OPENBLAS_NUM_THREADS", "1", "--setenv", "OMP_NUM_THREADS", "1"]


def _is_system(folder: str) -> bool:
    return folder == "/" or Path(folder).is_relative_to("/usr")
