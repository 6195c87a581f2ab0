"""The beginning of this program, which is before its first line of Python."""

import os
import sys
import time
from pathlib import Path

STARTED = 19
"""Place of a process's start in what follows its name in /proc/self/stat, in ticks since the machine's (proc(5))."""
INTERPRETER_BEGAN = time.monotonic() - time.process_time()
"""The import of this module, which `rlframe.main` imports first, less what the interpreter has computed until then."""


def program_began() -> float:
    """Returns the beginning of this program, of `time.monotonic`.

    A process can be older than its program: a shell becomes the last command of its script. It can be younger than the
    import of this module: it was forked.
    """
    if sys.platform != "linux":
        return INTERPRETER_BEGAN
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")
    return max(time.monotonic() - age_s, INTERPRETER_BEGAN)
