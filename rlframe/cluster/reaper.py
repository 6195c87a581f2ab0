"""Ends the processes of a run after the run has ended in any way: `python -m rlframe.cluster.reaper PID WARNING_S
[SPARED ...]`.

A killed run cannot end its processes, and they may then have other parents. So this small process, which no signal to
the run reaches, records the processes under the run while it lasts. It also reports a stopped driver, which no thread
of the driver could do.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlframe.cluster.watch.sight import RAY_SERVERS, State, process_state

BEAT, LEAVE = b".", b"e"
LOOK_S = 1.0
"""Seconds between two looks at the processes under the run."""
DEATH_S = 1.0
"""Seconds by which the pipe of a killed process may close before the process is gone."""
PATIENCE_S = 3.0
"""Seconds that processes have to end by themselves, and again after a request to end."""
TRACKER = "multiprocessing.resource_tracker"
"""In the command of a process that removes what others have left in /dev/shm, as soon as they have all ended."""
LONGEST_TURN_S = 30.0
"""Least time in seconds that a running driver may take between two beats, because its watchdog also looks at other
machines."""


@dataclass(frozen=True, slots=True)
class Reaper:
    """Holds what the driver tells its reaper."""

    beat: Callable[[], None]
    """To be called about once a second."""
    leave: Callable[[], None]
    """To be called when the run is over: Ray's servers end from here on because they are told to."""


@contextmanager
def reaping(warning_s: float) -> Iterator[Reaper]:
    """Has whatever this process starts inside the `with` block ended a few seconds after the block, or after the death
    of this process.

    Args:
        warning_s: seconds without a beat after which a warning on standard error reports it.

    Yields:
        The two signals to the process that cleans up.
    """
    before = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    # A session of its own: neither Ctrl-C nor a signal to the run's process group reaches it.
    reaper = subprocess.Popen(
        [sys.executable, "-m", "rlframe.cluster.reaper", str(os.getpid()), str(warning_s), *before],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        bufsize=0,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert reaper.stdin
    pipe = reaper.stdin
    # A reaper that is stopped or gone must not delay the run.
    os.set_blocking(pipe.fileno(), False)

    def write(word: bytes) -> None:
        # After the block the pipe is closed.
        with suppress(OSError, ValueError):
            pipe.write(word)

    try:
        yield Reaper(beat=lambda: write(BEAT), leave=lambda: write(LEAVE))
    finally:
        pipe.close()


def main() -> None:
    """Watches the process with the first pid until it ends or closes the pipe. The processes with the other pids
    existed before and are spared."""
    # `ray job stop` signals each process under the job, and this one has work to do after them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    run, warning_s, before = psutil.Process(int(sys.argv[1])), float(sys.argv[2]), [*map(int, sys.argv[3:])]
    known: set[psutil.Process] = set()
    beaten_s: float | None = None
    servers, has_left = Servers(), False
    while lives(run):
        known = set(filter(lives, known)) | {each for each in under(run) if each.pid not in before}
        servers.add(known)
        ready, _, _ = select.select([0, *servers.handles], [], [], LOOK_S)
        if lives(run):
            servers.note_deaths(ready)
        if 0 in ready:
            words = os.read(0, select.PIPE_BUF)
            if not words:
                break
            beaten_s, has_left = time.monotonic(), has_left or LEAVE in words
        elif beaten_s is not None and (sentence := silence(run, time.monotonic() - beaten_s, warning_s)):
            print_line(sentence)
            beaten_s = None
    has_left = has_left or (LEAVE in os.read(0, select.PIPE_BUF) if select.select([0], [], [], 0)[0] else False)
    if not has_left and ends_within(run, DEATH_S):
        print_line(f"the driver (pid {run.pid}) ended unexpectedly: {servers.cause()}; the same command resumes "
            "from the last checkpoint, if any\n")  # fmt: skip
    # A reader of the run's standard error sees its end now and need not wait for the cleanup below.
    os.close(2)
    end(known)


class Servers:
    """The servers of Ray under the run, and those that died while the run was alive."""

    def __init__(self) -> None:
        self.handles: dict[int, str] = {}
        """Objects that become readable when a server has ended, with the server's name and pid."""
        self._watched: set[psutil.Process] = set()
        self._dead: list[str] = []

    def add(self, processes: set[psutil.Process]) -> None:
        """Watches those of the processes that are servers of Ray."""
        for process in processes - self._watched:
            with suppress(OSError):
                # Not psutil's name, which it keeps: a process that is seen between fork and exec has its parent's.
                if (name := Path(f"/proc/{process.pid}/comm").read_text().strip()) in RAY_SERVERS:
                    self._watched.add(process)
                    self.handles[os.pidfd_open(process.pid)] = f"{name} (pid {process.pid})"

    def note_deaths(self, ready: list[int]) -> None:
        """Notes the servers of these handles. The run is known to have been alive when they were ready."""
        for handle in [*filter(self.handles.__contains__, ready)]:
            self._dead.append(self.handles.pop(handle))
            os.close(handle)

    def cause(self) -> str:
        """Returns what is known of why the run ended unexpectedly."""
        if self._dead:
            return f"Ray ends a driver whose {' and '.join(self._dead)} died"
        # Ray may have been quicker than the look at the handles.
        ready, _, _ = select.select([*self.handles], [], [], 0)
        if gone := [self.handles[handle] for handle in ready]:
            return f"it was killed, or Ray ended it because of {' and '.join(gone)}, which died at the same time"
        return "it was killed, perhaps for want of memory (`dmesg` shows that)"


def print_line(sentence: str) -> None:
    """Writes to the run's standard error, if anybody still reads it."""
    with suppress(OSError):
        os.write(2, sentence.encode())


def silence(run: psutil.Process, quiet_s: float, warning_s: float) -> str:
    """Returns a message about a driver that has not beaten for `quiet_s`. Empty if it is too early for one."""
    driver, setting = f"the driver (pid {run.pid})", f"(cluster.stall_warning_s={warning_s:g})\n"
    if quiet_s < warning_s:
        return ""
    if process_state(run.pid) is State.STOPPED:
        return (
            f"{driver} is stopped, and its run only finishes calls already begun; `kill -CONT {run.pid}` "
            f"continues it {setting}"
        )
    if quiet_s < LONGEST_TURN_S:
        return ""
    return (
        f"{driver} has given its watchdog no turn for {quiet_s:.0f} s: a call in C holds Python's lock, "
        f"or the machine lacks cores or memory; `py-spy dump --pid {run.pid}` shows where it is {setting}"
    )


def ends_within(process: psutil.Process, seconds: float) -> bool:
    """Returns whether the process is gone before so much time has passed."""
    deadline = time.monotonic() + seconds
    while lives(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives(process)


def lives(process: psutil.Process) -> bool:
    """Returns whether the process is running, and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def under(process: psutil.Process) -> set[psutil.Process]:
    """Returns all descendants of the process, except this process and its own."""
    try:
        found = set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()
    me = psutil.Process()
    return found - {me, *me.children(recursive=True)}


def end(known: set[psutil.Process]) -> None:
    """Waits for the processes and their descendants, asks remaining ones to end, and kills those that still remain:
    trackers after those that they clean up behind."""
    for act in (lambda process: None, psutil.Process.terminate, kill_tracked, psutil.Process.kill):
        known |= {child for process in known for child in under(process)}
        for process in known:
            try:
                act(process)
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + PATIENCE_S
        while (known := set(filter(lives, known))) and time.monotonic() < deadline:
            time.sleep(0.1)


def kill_tracked(process: psutil.Process) -> None:
    """Kills a process unless it is a tracker."""
    if TRACKER not in " ".join(process.cmdline()):
        process.kill()


if __name__ == "__main__":
    main()
