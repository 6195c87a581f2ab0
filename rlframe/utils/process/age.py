"""The beginning of this process, which is before its first line of Python."""

import os
import sys
import time
from pathlib import Path

STARTED = 19
"""Place of a process's start in what follows its name in /proc/self/stat, in ticks since the machine's (proc(5))."""


def program_began() -> float:
    """Returns the beginning of this process, of `time.monotonic`, or the present where the system does not tell."""
    now = time.monotonic()
    if sys.platform != "linux":
        return now
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
