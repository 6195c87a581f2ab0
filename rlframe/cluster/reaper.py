"""Ends the processes of a run after the run has ended in any way: `python -m rlframe.cluster.reaper PID WARNING_S
[SPARED ...]`.

A killed run cannot end its processes, and they may then have other parents. So this small process, which no signal to
the run reaches, records the processes under the run while it lasts. It also reports a stopped driver, which no thread
of the driver could do.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from rlframe.cluster.watch.sight import State, process_state

LOOK_S = 1.0
"""Seconds between two looks at the processes under the run."""
PATIENCE_S = 3.0
"""Seconds that processes have to end by themselves, and again after a request to end."""
LONGEST_TURN_S = 30.0
"""Least time in seconds that a running driver may take between two beats, because its watchdog also looks at other
machines."""


@contextmanager
def reaping(warning_s: float) -> Iterator[Callable[[], None]]:
    """Makes sure that all processes started inside the `with` block end a few seconds after the block, or after the
    death of this process.

    Args:
        warning_s: seconds without a beat after which a warning on standard error reports it.

    Yields:
        The beat, which must be called about once a second.
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

    def beat() -> None:
        # The pipe is closed after the block.
        with suppress(OSError, ValueError):
            pipe.write(b".")

    try:
        yield beat
    finally:
        pipe.close()


def main() -> None:
    """Watches the process with the first pid until it ends or closes the pipe. The processes with the other pids
    existed before and are spared."""
    run, warning_s, before = psutil.Process(int(sys.argv[1])), float(sys.argv[2]), [*map(int, sys.argv[3:])]
    known: set[psutil.Process] = set()
    beaten_s: float | None = None
    while lives(run):
        known = set(filter(lives, known)) | {each for each in under(run) if each.pid not in before}
        if select.select([0], [], [], LOOK_S)[0]:
            if not os.read(0, select.PIPE_BUF):
                break
            beaten_s = time.monotonic()
        elif beaten_s is not None and (sentence := silence(run, time.monotonic() - beaten_s, warning_s)):
            with suppress(OSError):
                os.write(2, sentence.encode())
            beaten_s = None
    # Readers of the run's standard error need not wait for the following.
    os.close(2)
    end(known)


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
    """Waits for the processes and their descendants, asks remaining ones to end, and kills those that still remain."""
    for act in (lambda process: None, psutil.Process.terminate, psutil.Process.kill):
        known |= {child for process in known for child in under(process)}
        for process in known:
            try:
                act(process)
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + PATIENCE_S
        while (known := set(filter(lives, known))) and time.monotonic() < deadline:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
