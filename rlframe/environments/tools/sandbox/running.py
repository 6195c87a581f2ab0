"""Runs one program: feeds it, reads what it writes, looks at its limits, and kills it with everything it started."""

import asyncio
import os
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rlframe.environments.tools.sandbox.inside import BEGUN
from rlframe.environments.tools.sandbox.limits import DidNotStart, Ended, Limits

READ_BYTES = 1 << 16
LOOK_S = 0.05
"""Seconds between two looks at limits that the kernel does not keep."""
END_TIMEOUT_S = 30.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
FOLDER = "/tmp"
"""The only folder of a sandbox in which a program can write."""
HOME = f"{FOLDER}/code"
"""The folder in which code begins, empty whatever else lies in FOLDER."""


class Running:
    """A program that runs. Everything happens in one event loop, and nothing blocks it."""

    def __init__(self, command: Sequence[str], limits: Limits, *, folder: str, descriptors: Sequence[int]):
        """Starts the program without waiting for it.

        Args:
            folder: its working folder.
            descriptors: further descriptors that it gets.
        """
        self._limits = limits
        self._output = bytearray()
        self._stopped = ""
        self._loop = asyncio.get_running_loop()
        self._is_over, self._is_read = asyncio.Event(), asyncio.Event()
        code, self._code = os.pipe()
        self._reads, writes = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=code,
                stdout=writes,
                stderr=writes,
                cwd=folder,
                env={},
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._code)
            os.close(self._reads)
            raise DidNotStart(str(error)) from None
        finally:
            os.close(code)
            os.close(writes)
        for descriptor in (self._code, self._reads):
            os.set_blocking(descriptor, False)
        self._handle = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._handle, self._is_over.set)
        self._loop.add_reader(self._reads, self._read)

    async def finish(self, code: str) -> Ended:
        """Gives the program its code, and waits for its end.

        Raises:
            DidNotStart: it ended before the code began.
        """
        self._to_send = bytearray(code.encode("utf-8", errors="replace"))
        self._loop.add_writer(self._code, self._send)
        watch = self._loop.create_task(self._watch())
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._is_over.wait()
        except TimeoutError:
            self._stop(f"took longer than {self._limits.timeout_s:g} s")
        finally:
            watch.cancel()
            self._release()
        output = bytes(self._output)
        if not output.startswith(BEGUN):
            why = self._stopped or output.decode("utf-8", errors="replace")[-300:].strip()
            raise DidNotStart(why or f"exit code {self._process.returncode}")
        text = output[len(BEGUN) :][: self._limits.output_bytes].decode("utf-8", errors="replace")
        status = self._process.returncode
        exit_code = 128 - status if status < 0 else status
        if not self._stopped and exit_code == 128 + signal.SIGXCPU:
            self._stopped = f"used a processor for more than {self._limits.cpu_s} s"
        return Ended(output=text, exit_code=exit_code, stopped=self._stopped)

    def _send(self) -> None:
        """Writes as much of the code as the pipe accepts, and closes it after the last."""
        try:
            del self._to_send[: os.write(self._code, self._to_send)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._to_send.clear()
        if not self._to_send:
            self._close_code()

    def _close_code(self) -> None:
        if self._code >= 0:
            self._loop.remove_writer(self._code)
            os.close(self._code)
            self._code = -1

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._reads, READ_BYTES)
            self._output += data
            if not data:
                self._loop.remove_reader(self._reads)
            elif len(self._output) > self._limits.output_bytes + len(BEGUN):
                self._loop.remove_reader(self._reads)
                self._stop(f"wrote more than {self._limits.output_bytes} bytes")

    def _stop(self, why: str) -> None:
        """Kills the program on account of a limit. The first one counts."""
        self._stopped = self._stopped or why
        self._kill()

    def _kill(self) -> None:
        """Kills everything that the program has started, then itself."""
        if self._process.returncode is not None:
            return
        for pid in [pid for pid, _ in descendants(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _release(self) -> None:
        """Ends what is left of the program, reads the rest of its output, and closes all descriptors."""
        self._loop.remove_reader(self._handle)
        self._loop.remove_reader(self._reads)
        self._close_code()
        # The first process has ended or is killed here; its group may hold others.
        self._kill()
        self._process.wait(timeout=END_TIMEOUT_S)
        rest = self._limits.output_bytes + len(BEGUN)
        with suppress(BlockingIOError):
            while len(self._output) <= rest and (data := os.read(self._reads, READ_BYTES)):
                self._output += data
        os.close(self._handle)
        os.close(self._reads)

    async def _watch(self) -> None:
        """Looks at what the kernel does not limit for all processes together."""
        while True:
            await asyncio.sleep(LOOK_S)
            found = list(descendants(self._process.pid))
            if len(found) > self._limits.processes + 2:
                self._stop(f"had more than {self._limits.processes} processes")
            memory = sum(memory_of(pid) for pid in (self._process.pid, *(pid for pid, _ in found)))
            # Processes below the first one's child have seen the sandbox made.
            for pid in (pid for pid, depth in found if depth > 1):
                file_bytes, files = folder_of(pid)
                memory += file_bytes
                if files > self._limits.files:
                    self._stop(f"had more than {self._limits.files} files")
                break
            if memory > self._limits.memory_bytes:
                self._stop(f"used more than {self._limits.memory_bytes >> 20} MiB of memory")


def descendants(pid: int, depth: int = 1) -> Iterator[tuple[int, int]]:
    """Yields the id of every process that `pid` has started, directly or not, with its distance."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(each) for each in file.read_text().split()]
        except (OSError, ValueError):
            continue  # It has ended meanwhile.
        for child in children:
            yield child, depth
            yield from descendants(child, depth + 1)


def memory_of(pid: int) -> int:
    """Returns the bytes of memory of a process, its part of what it shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    except PermissionError:
        pass
    except OSError:
        return 0
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def folder_of(pid: int) -> tuple[int, int]:
    """Returns bytes and number of the files in the folder of a sandbox, which lie in memory; zeros if it has ended."""
    try:
        folder = os.path.join("/proc", str(pid), "root", FOLDER[1:])
        if os.stat(folder).st_dev == os.stat(FOLDER).st_dev or not stat.S_ISDIR(os.stat(folder).st_mode):
            return 0, 0
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree
