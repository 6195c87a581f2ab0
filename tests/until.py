"""Waiting for a state: a test that says what it waits for depends on no machine's speed."""

import time
from collections.abc import Callable
from typing import TypeVar

from rlframe.cluster.watch.sight import State, process_state

T = TypeVar("T")
PATIENCE_S = 120.0
"""Whatever is waited for takes less than a hundredth of this, on a machine that does nothing else."""


def until(moment: Callable[[], object], *, what: str = "", every_s: float = 0.02) -> None:
    """Returns as soon as `moment()` is true; fails if it never is.

    Args:
        what: what to say then.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not moment():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain: {what or moment}"
        time.sleep(every_s)


def until_state(pid: int, state: State) -> None:
    """Returns once the process is stopped, or dead: a signal takes its time. One that nobody has waited for is dead
    too."""
    until(lambda: process_state(pid) is state, what=f"process {pid} is {state}")


def under_a_fair_limit(work: Callable[[float], T], is_fair: Callable[[T], bool], *, first_s: float) -> T:
    """Returns what `work(limit_s)` finds under the first limit that is fair on this machine: what is to keep the limit
    keeps it. A busy machine is given ten, and a hundred times as long.

    Args:
        is_fair: whether nothing in what was found is late that must not be.
    """
    for limit_s in (first_s, 10 * first_s, 100 * first_s):
        found = work(limit_s)
        if is_fair(found):
            break
    return found
