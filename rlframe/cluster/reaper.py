"""Ends what a run started when it has ended, however that came: `python -m rlframe.cluster.reaper PID [SPARED ...]`.

A run that is killed can end nothing itself, and what it started may then have other parents. So this small process,
which no signal to the run reaches, notes what is under the run while it goes on.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LOOK_S = 1.0
"""Between two looks at what is under the run."""
PATIENCE_S = 3.0
"""How long processes have to end by themselves, and again once they are asked to."""


@contextmanager
def reaping() -> Iterator[None]:
    """Has whatever this process starts inside the `with` block ended a few seconds after the block, or after the death
    of this process."""
    before = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    # A session of its own: neither Ctrl-C nor a signal to the run's process group reaches it.
    reaper = subprocess.Popen(
        [sys.executable, "-m", "rlframe.cluster.reaper", str(os.getpid()), *before],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert reaper.stdin
    try:
        yield
    finally:
        reaper.stdin.close()


def main() -> None:
    """Watches the process of the first number until it ends or closes the pipe to this one. Those of the others were
    there before."""
    number, *before = map(int, sys.argv[1:])
    run = psutil.Process(number)
    known: set[psutil.Process] = set()
    while lives(run):
        known = set(filter(lives, known)) | {each for each in under(run) if each.pid not in before}
        if select.select([0], [], [], LOOK_S)[0]:
            break
    end(known)


def lives(process: psutil.Process) -> bool:
    """Returns whether the process is there, and not only an exit code that nobody has asked for."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def under(process: psutil.Process) -> set[psutil.Process]:
    """Returns everything that the process started and that still has it above, this process and its own aside."""
    try:
        found = set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()
    me = psutil.Process()
    return found - {me, *me.children(recursive=True)}


def end(known: set[psutil.Process]) -> None:
    """Waits for the processes and all under them; asks those that stay to end, and kills those that still stay."""
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
