"""The state of a process as seen from outside, on its own machine: kernel state, last mark, stack, flight record, log.

`look` runs in the driver for processes of its machine, and as a Ray task on other machines, so it must not need Ray
itself.
"""

import contextlib
import os
import pathlib
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

from rlframe.cluster.watch.flight import Flight, read_flight
from rlframe.cluster.watch.marks import Page

STACK_SIGNAL = signal.SIGUSR2
LOG_LINES = 20
STACK_LINES = 60
IDLE = ("in answer_requests", "gc_collect_manager", "<no Python frame>")
"""Marks of threads in a stack that only wait for others: rlframe's, Ray's, and those in C only."""
ANSWER_S = 1.5
"""Seconds that a process may take to print its stack and to write its flight record."""

RAY_SERVERS = ("raylet", "gcs_server")
"""Programs of Ray without which no process of a run goes on for long."""


class State(StrEnum):
    """States of a process according to the kernel."""

    RUNNING = "running"
    """On a core, or ready for one."""
    WAITING = "waiting"
    """Waiting for a message, a file or a clock."""
    STOPPED = "stopped"
    """Stopped by a signal (SIGSTOP, Ctrl-Z) or a debugger, until it is continued."""
    DEAD = "dead"
    UNKNOWN = "out of sight"
    """Unknown, because its machine does not answer."""


STATES = {"R": State.RUNNING, "T": State.STOPPED, "t": State.STOPPED, "Z": State.DEAD, "X": State.DEAD}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """State of one process."""

    state: State
    last: str = ""
    """Its last mark. Empty if it has made none."""
    age_s: float | None = None
    """Seconds since its last mark."""
    stack: str = ""
    log: str = ""
    """The last lines of its log, with a heading."""
    flight: Flight | None = None

    @property
    def can_answer(self) -> bool:
        """Returns whether the process can continue by itself."""
        return self.state not in (State.STOPPED, State.DEAD)


def process_state(pid: int) -> State:
    """Returns the state of process `pid` of this machine."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return State.DEAD
    # The name, in parentheses, may contain any character.
    return STATES.get(text.rpartition(")")[2].split()[0], State.WAITING)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that process `pid` of this machine and its descendants have used, such as vLLM's workers,
    which an engine's core starts. 0 if it has ended."""
    ticks, family = 0, [str(pid)]
    for each in family:
        # A process that ends meanwhile has no part in it.
        with contextlib.suppress(OSError):
            fields = pathlib.Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            for thread in pathlib.Path(f"/proc/{each}/task").iterdir():
                family += (thread / "children").read_text().split()
    return ticks / os.sysconf("SC_CLK_TCK")


def look(log: str, pid: int, *, closely: bool = True) -> Sight:
    """Returns the state of process `pid`, whose log is the file `log` of this machine.

    Args:
        closely: also make it print its stack and write its flight record.
    """
    file, state = pathlib.Path(log), process_state(pid)
    try:
        page = Page(mark_file(file))
    except OSError:
        page = None
    # Read before the stack is printed there.
    lines = log_tail(log)
    stack, flight = "", None
    if closely and state not in (State.STOPPED, State.DEAD):
        stack = ask(file, pid, page)
        flight = read_flight(flight_file(file))
    last = page.read() if page else None
    if page:
        page.close()
    return Sight(
        state=state,
        last=last.text if last else "",
        age_s=time.monotonic() - last.at_s if last and last.number else None,
        stack=stack,
        log=lines,
        flight=flight,
    )


def ask(log: pathlib.Path, pid: int, page: Page | None) -> str:
    """Makes process `pid` write its flight record and print its stacks. Returns the stacks of threads that do
    something."""
    stacks = stack_file(log)
    flight_file(log).unlink(missing_ok=True)
    number = page.request() if page else 0
    begin = stacks.stat().st_size if stacks.is_file() else 0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACK_SIGNAL)
    deadline, size = time.monotonic() + ANSWER_S, begin
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, size = size, stacks.stat().st_size if stacks.is_file() else begin
        # Stacks are printed line by line. They are whole when nothing was added since the look before.
        if begin < before == size and (page is None or page.requests()[1] >= number):
            break
    if not stacks.is_file():
        return ""
    with stacks.open("rb") as file:
        file.seek(begin)
        threads = file.read().decode("utf-8", "replace").split("\n\n")
    busy = [line for thread in threads if not any(name in thread for name in IDLE) for line in thread.splitlines()]
    return "\n".join(f"  | {line}" for line in busy[-STACK_LINES:])


def log_tail(log: str) -> str:
    """Returns the last lines of a log file of this machine, with a heading."""
    file = pathlib.Path(log)
    if not file.is_file():
        return f"(no log at {log})"
    lines = file.read_text(errors="replace").splitlines()
    return "\n".join([f"last lines of {log}:", *(f"  | {line}" for line in lines[-LOG_LINES:])])


def mark_file(log: pathlib.Path) -> pathlib.Path:
    """Returns where the rank with this log keeps its marks."""
    return log.with_suffix(".mark")


def stack_file(log: pathlib.Path) -> pathlib.Path:
    """Returns where the rank with this log prints its stacks."""
    return log.with_suffix(".stacks")


def flight_file(log: pathlib.Path) -> pathlib.Path:
    """Returns where the rank with this log writes its flight record."""
    return log.with_suffix(".flight.json")
