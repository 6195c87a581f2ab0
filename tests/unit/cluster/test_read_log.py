"""The last lines of a worker's log, and its stack."""

import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlframe.cluster.watch import sight
from rlframe.cluster.watch.sight import LOG_LINES, State, ask, log_tail, look
from tests.until import PATIENCE_S, until, until_state

pytestmark = pytest.mark.later

HANGING = """
import sys, time
from rlframe.cluster.worker import Worker

def wait_for_ever():
    time.sleep(600)

Worker(role="policy", rank=3, log_folder=sys.argv[1], num_threads=1)
print("started", flush=True)
wait_for_ever()
"""


def test_the_last_lines_are_quoted(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "policy-0.log"
    file.write_text("".join(f"line {index}\n" for index in range(LOG_LINES + 30)))
    first, *quoted = log_tail(str(file)).splitlines()
    assert first == f"last lines of {file}:"
    assert quoted == [f"  | line {index}" for index in range(30, LOG_LINES + 30)]


def test_a_log_that_is_no_text_is_quoted_too(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.log"
    file.write_bytes(b"good\n\xff\xfe bad\n")
    assert log_tail(str(file)).splitlines()[1:] == ["  | good", "  | \ufffd\ufffd bad"]


def test_a_missing_log_is_said(tmp_path: pathlib.Path) -> None:
    assert log_tail(str(tmp_path / "none.log")) == f"(no log at {tmp_path}/none.log)"


def test_a_process_that_is_gone_is_no_error(tmp_path: pathlib.Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert look(str(tmp_path / "none.log"), gone.pid).log.startswith("(no log at")


def test_a_hanging_worker_shows_its_stack_and_lives_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sight, "ANSWER_S", PATIENCE_S)
    with subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path)]) as process:
        try:
            file = tmp_path / "policy-3.log"
            until(lambda: process.poll() is not None or (file.is_file() and "started" in file.read_text()))
            until_state(process.pid, State.WAITING)
            seen = look(str(file), process.pid)
            assert "in wait_for_ever" in seen.stack and "answer_requests" not in seen.stack
            assert "started" in seen.log and "wait_for_ever" not in look(str(file), process.pid).log
            assert seen.state is State.WAITING and seen.last == "start: the process runs"
            assert process.poll() is None
        finally:
            process.kill()


def test_stacks_are_read_when_nothing_is_added_to_them_any_more(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = ["Thread 1:\n  in first\n\n", "Thread 2:\n  in second\n"]

    def sleep(_: float) -> None:
        """Another piece is printed between two looks."""
        with (tmp_path / "policy-3.stacks").open("a") as file:
            file.write(pieces.pop(0) if pieces else "")

    monkeypatch.setattr(sight, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    with subprocess.Popen(["sleep", "600"]) as process:
        found = ask(tmp_path / "policy-3.log", process.pid, None)
    assert "in first" in found and "in second" in found
