"""When a program began, which is neither when its process did nor when it asks."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.later
PROGRAM = "import time; from rlframe import main; from rlframe.utils.process.age import program_began as began; {}"
TELLS = "time.sleep(0.5); print(time.monotonic() - began())"
SLEEPS_S = 3


def test_what_a_shell_did_before_it_became_the_program_is_not_the_programs_time() -> None:
    child = (
        f"import os, sys, time; time.sleep({SLEEPS_S}); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    command = [sys.executable, "-c", child, PROGRAM.format(TELLS)]
    age_s = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.5 < age_s < SLEEPS_S


def test_a_forked_program_began_when_it_was_forked() -> None:
    forks = "time.sleep(1); before = time.monotonic(); os.fork() or print(began() - before, flush=True)"
    found = subprocess.run(
        [sys.executable, "-c", "import os; " + PROGRAM.format(forks)], capture_output=True, text=True
    )
    # The kernel counts in hundredths of a second.
    assert -0.02 < float(found.stdout), found.stderr
