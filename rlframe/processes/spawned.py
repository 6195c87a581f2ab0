"""A bare interpreter that runs users' code, and the pipes to it. Nothing here waits, but for its end."""

import os
import secrets
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress

END_TIMEOUT_S = 120.0
READ_BYTES = 1 << 16
KEPT_BYTES = 1 << 14
"""Greatest number of printed bytes that are kept."""


class Spawned:
    """A process with three pipes: requests to it, its answers, and what it prints. Our ends never block."""

    def __init__(self, program: str, *arguments: str, inherited: tuple[int, ...] = ()):
        """Starts `python -m program REQUESTS ANSWERS arguments...` without waiting for it.

        Args:
            inherited: further descriptors that it gets, under the same numbers.

        Raises:
            OSError: the system does not start it. No pipe is left then.
        """
        self.key = secrets.token_hex(8)
        """A word that its answers carry, and that no text which it prints has."""
        with ExitStack() as failed:
            reads_requests, self.requests = _pipe(failed)
            self.answers, writes_answers = _pipe(failed)
            self.prints, prints = _pipe(failed)
            # A session of its own: Ctrl-C does not reach it, and processes that it starts are killed with it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(reads_requests), str(writes_answers), *arguments],
                pass_fds=[reads_requests, writes_answers, *inherited],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                start_new_session=True,
            )
            failed.pop_all()
        for theirs in (reads_requests, writes_answers, prints):
            os.close(theirs)
        self._open = [self.requests, self.answers, self.prints]
        for ours in self._open:
            os.set_blocking(ours, False)
        self._kept = bytearray()
        self.can_print = True
        """Whether the pipe of what it prints is open."""

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def read_printed(self) -> None:
        """Reads what it has printed, of which the end is kept."""
        with suppress(BlockingIOError):
            text = os.read(self.prints, READ_BYTES)
            self.can_print = bool(text)
            self._kept = (self._kept + text)[-KEPT_BYTES:]

    def printed(self) -> str:
        """Returns the end of its output since the last call."""
        self.read_printed()
        text = self._kept.decode("utf-8", errors="replace")
        self._kept.clear()
        return text

    def exit_code(self) -> int | str:
        """Returns its exit code, after its pipe of answers was closed."""
        try:
            return self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "none, it only closed its pipe"

    def kill(self) -> None:
        """Kills the process and everything in its session, and closes the pipes. A second call does nothing."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        end_session(self._process.pid)
        self._process.wait(timeout=END_TIMEOUT_S)
        while self._open:
            os.close(self._open.pop())


def _pipe(failed: ExitStack) -> tuple[int, int]:
    """Returns the ends of a pipe, which `failed` closes."""
    ends = os.pipe()
    for end in ends:
        failed.callback(os.close, end)
    return ends


def end_session(leader: int) -> None:
    """Kills the processes of a session but this one, those in groups of their own too.

    Args:
        leader: id of the process that began the session.
    """
    for name in os.listdir("/proc"):
        with suppress(ProcessLookupError, PermissionError):
            if name.isdigit() and int(name) != os.getpid() and os.getsid(int(name)) == leader:
                os.kill(int(name), signal.SIGKILL)
