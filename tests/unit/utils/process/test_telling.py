"""A start is told from its first moment, also while an import holds Python's lock."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlframe.main import asks_for_run
from rlframe.utils.process import telling

PROGRAM = """
import threading
from rlframe.utils.process import telling
telling._Own.telling = telling.Telling(every_s=0.05)
print("begun", flush=True)
import slow_package
telling.end()
print("ended", flush=True)
"""
PACKAGE = """
import ctypes, sys
sys.stdin.buffer.raw.read(1)
# Unlike CDLL it keeps Python's lock, as an import does while the system reads a library.
ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
"""


@pytest.mark.later
def test_lines_come_also_while_nothing_in_the_program_can_run(tmp_path: Path) -> None:
    (tmp_path / "slow_package.py").write_text(PACKAGE)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, bufsize=0) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == b"begun\n"
        # The import waits for a byte without the lock, so that the thread sees it, and then for one with the lock.
        while b"import of slow_package" not in process.stderr.readline():
            assert process.poll() is None
        process.stdin.write(b".")
        for _ in range(10):
            assert b"import of slow_package" in process.stderr.readline()
        process.stdin.write(b".")
        assert process.stdout.readline() == b"ended\n"
        assert process.wait() == 0


def test_what_runs_nothing_is_not_told() -> None:
    assert asks_for_run([]) and asks_for_run(["--config-name", "grpo"]) and asks_for_run(["-m", "seed=1,2"])
    assert asks_for_run(["seed=1"]) and asks_for_run(["~reward.parts.exact_match"])
    assert (
        not asks_for_run(["doctor"])
        and not asks_for_run(["--help=train"])
        and not asks_for_run(["a=1", "--cfg", "job"])
    )


def test_ending_twice_and_telling_nobody_are_harmless() -> None:
    telling.end()
    telling.tell(lambda: "x")
    telling.end()
    assert telling.importing() == "" or "import of" in telling.importing()
