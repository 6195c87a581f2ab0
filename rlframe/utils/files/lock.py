"""A lock for a folder that one process at a time may write to, also if hosts share it over a network.

Each process that wants the folder puts a file of its own there, `LOCK-<host>-<pid>-<number>`, and looks at those of the
others. It steps back for a process that holds the folder, and for one that asks at the same moment under a smaller
name. It holds the folder once it sees none. Because it looks after it has put its file there, at least one of two
processes that ask sees the other. No file changes its owner, so taking over from a dead process only removes that
process's file, in which there is no race. (flock would be simpler, but is missing or local on many network file
systems.)

A holder is dead if its process has ended. On the same host that is detected at once, by its pid and start time. Of a
holder on another host, or in another container, only the heartbeat can be seen: the modification time of its file,
every BEAT_S. A holder whose file does not change for STALE_S while another process watches is taken for dead. Limits: a
holder that was only stopped that long on another host is taken for dead too, and ends with a message when it continues;
and a folder of which two hosts see different versions for longer than STALE_S is not protected.
"""

import contextlib
import json
import logging
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rlframe.utils.errors import ConfigError, OutputError
from rlframe.utils.files.whole import write_whole

logger = logging.getLogger(__name__)
CLOSE_S = 5.0
"""Seconds that `close` waits for a heartbeat under way."""
BEAT_S = 5.0
STALE_S = 60.0
POLL_S = 0.05
PREFIX = "LOCK-"
HIDDEN = "hidden"
"""Start time of another user's process, if /proc does not show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds or requests a folder."""

    host: str
    machine: str
    """Boot id of the kernel and namespace of pids. If they differ, a pid means nothing."""
    pid: int
    started: str
    """Start time of the process in kernel ticks, because pids are reused."""
    command: str
    since: float
    """Unix time of the request."""
    holds: bool
    """False while it checks whether it may hold the folder."""

    @classmethod
    def of_this_process(cls, *, holds: bool) -> "Holder":
        """Returns the entry of this process."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            command=shlex.join([Path(sys.executable).name, *sys.argv])[:500],
            since=time.time(),
            holds=holds,
        )

    def alive(self) -> bool | None:
        """Returns whether the process still runs. None if that cannot be seen from here."""
        if self.host != socket.gethostname() or self.machine != _machine():
            return None
        started = _started(self.pid)
        return None if started == HIDDEN else started == self.started

    def __str__(self) -> str:
        minutes = (time.time() - self.since) / 60
        age = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
        return f"pid {self.pid} on {self.host} for {age} (`{self.command}`)"


class FolderLock:
    """Holds a folder from its construction to `close`."""

    def __init__(self, folder: Path):
        """Args:
            folder: must exist.

        Raises:
            ConfigError: another process holds the folder; the message names it, since when, and what to do.
            OutputError: the folder cannot be written to.
        """
        self.folder = folder
        self.file = folder / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._watched: dict[Path, tuple[int, float]] = {}
        self._end = threading.Event()
        self._lost = False
        self._write(holds=False)
        try:
            self._acquire()
            self._write(holds=True)
        except BaseException:
            self._remove()
            raise
        self._heart = threading.Thread(target=self._beat, name="heartbeat of the output's lock", daemon=True)
        self._heart.start()

    def check(self) -> None:
        """Raises OutputError if the folder no longer belongs to this process."""
        if self._lost:
            what = f"its lock {self.file.name} was removed, so that another run may write to it"
            if not self.folder.is_dir():
                what = "it was removed or moved during the run"
            raise OutputError(
                f"output: {self.folder} is lost to this run: {what}; the run ends and writes nothing more"
            )

    def close(self) -> None:
        """Releases the folder."""
        self._end.set()
        # A heartbeat may hang on a file system that is gone.
        self._heart.join(timeout=CLOSE_S)
        self._remove()

    def _acquire(self) -> None:
        while others := self._others():
            for file, holder in others.items():
                alive = holder.alive() if holder else None
                if alive is False or (alive is None and self._stale(file)):
                    with contextlib.suppress(FileNotFoundError):
                        file.unlink()
                elif (alive or self._beats(file)) and (holder is None or holder.holds or file < self.file):
                    raise ConfigError([_refusal(self.folder, file, holder)])
            time.sleep(POLL_S)

    def _others(self) -> dict[Path, Holder | None]:
        """Returns the other holders. None stands for one whose file cannot be read."""
        return {file: _read(file) for file in sorted(self.folder.glob(f"{PREFIX}*")) if file != self.file}

    def _stale(self, file: Path) -> bool:
        """Returns whether a file has not changed for STALE_S of watching."""
        changed = _changed(file)
        if file not in self._watched:
            self._watched[file] = changed, time.monotonic()
            logger.warning(
                "output: %s belongs to a run on another host, which may have ended; the folder is taken "
                "over if the file does not change within %g s. Delete the file if you know that the run has ended",
                file,
                STALE_S,
            )
        first, since = self._watched[file]
        return changed == first and time.monotonic() - since > STALE_S

    def _beats(self, file: Path) -> bool:
        """Returns whether a file has changed since the first look at it."""
        return _changed(file) not in (0, self._watched[file][0])

    def _write(self, *, holds: bool) -> None:
        write_whole(self.file, json.dumps(asdict(Holder.of_this_process(holds=holds)), indent=1).encode())

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                os.utime(self.file)
            except (FileNotFoundError, NotADirectoryError):
                self._lost = True
                return
            except OSError:  # The network may come back; the file still belongs to this process.
                continue

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink()


def _refusal(folder: Path, file: Path, holder: Holder | None) -> str:
    who = str(holder) if holder else f"the owner of {file.name}, which cannot be read"
    return (
        f"output: {folder} is in use by {who}; wait until it has ended, end it, or choose another folder "
        "with output=. Nothing was changed"
    )


def _read(file: Path) -> Holder | None:
    try:
        return Holder(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _changed(file: Path) -> int:
    """Returns the modification time of a file in nanoseconds. 0 if it is gone."""
    try:
        # Opening it asks the server; a status alone may be a minute old.
        with file.open("rb") as handle:
            return os.fstat(handle.fileno()).st_mtime_ns
    except OSError:
        return 0


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.exists() else "unknown"
    with contextlib.suppress(OSError):
        identity += f" {os.readlink('/proc/self/ns/pid')}"
    return identity


def _started(pid: int) -> str | None:
    """Returns the kernel's start time of a process. None if it has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return HIDDEN
    return None if fields[0] in ("Z", "X") else fields[19]
