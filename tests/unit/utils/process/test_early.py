"""An interpreter that starts before it is known what it does."""

import ast
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from pathlib import Path

import pytest

from rlframe.cluster.watch.sight import State
from rlframe.utils.process.early import MOST_FILES, EarlyContext, EarlyProcess, EarlyProgram
from tests.until import until, until_state

pytestmark = pytest.mark.later


def write_environment(file: str, code: int) -> None:
    """What the processes below do."""
    Path(file).write_text(f"{os.getpid()} {os.environ['ADDED']}", encoding="utf-8")
    sys.exit(code)


def test_what_is_spawned_later_runs_in_the_interpreter_that_was_started_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EarlyProcess("import json")
    monkeypatch.setenv("ADDED", "since then")
    context, file = early.context(), tmp_path / "said"
    first, second = (context.Process(target=write_environment, args=(str(file), code)) for code in (3, 4))
    first.start()
    first.join()
    assert early.used and first.pid == early.pid and first.exitcode == 3
    assert file.read_text() == f"{early.pid} since then"
    # Another one is spawned as usual.
    second.start()
    second.join()
    assert second.exitcode == 4 and second.pid != early.pid


def test_an_early_process_starts_those_below_it_before_it_imports_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, below = tmp_path / "said", tmp_path / "below"
    monkeypatch.setenv("KEPT", "the user's")
    for name in ("ADDED", "WANTED"):
        # Noted, so that what the program sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    says = "import os; from pathlib import Path; from rlframe.utils.process import early; "
    says += "Path({file!r}).write_text(repr({what}))"
    program = EarlyProgram(
        first=says.format(file=str(file), what="[each.pid for each in early.STARTED]"),
        below=(says.format(file=str(below), what="[os.getpid(), *map(os.getenv, ('ADDED', 'KEPT', 'WANTED'))]"),),
        environment={"WANTED": "1"},
        defaults={"ADDED": "2", "KEPT": "3"},
    )
    early = program.start()
    until(lambda: all(each.exists() and each.read_text().endswith("]") for each in (file, below)))
    (started,) = ast.literal_eval(file.read_text())
    assert early.can_take() and ast.literal_eval(below.read_text()) == [started, "2", "the user's", "1"]


def call_itself(file: str, title: str) -> None:
    """What a process does that wants a title, as vLLM's core."""
    setproctitle = importlib.import_module("setproctitle")
    setproctitle.setproctitle(title)
    Path(file).write_bytes(Path("/proc/self/cmdline").read_bytes())


@pytest.mark.parametrize("of_a_known_variable", [False, True])
def test_a_process_may_set_its_title_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_known_variable: bool
) -> None:
    """setproctitle looks for the first variable where it lay when the process started."""
    pytest.importorskip("setproctitle")
    early = EarlyProcess("import json")
    monkeypatch.setenv(next(iter(os.environ)) if of_a_known_variable else "ADDED", "since then")
    process = early.context().Process(target=call_itself, args=(str(tmp_path / "title"), "the core"))
    process.start()
    process.join()
    assert early.used and (tmp_path / "title").read_bytes().startswith(b"the core")


def test_an_interpreter_that_has_failed_or_would_be_another_one_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = EarlyProcess("raise SystemExit(1)")
    until(lambda: not failed.can_take())
    process = failed.context().Process(target=os.getpid)
    process.start()
    process.join()
    assert not failed.used and process.exitcode == 0 and process.pid != failed.pid
    waiting = EarlyProcess("pass")
    assert waiting.can_take()
    monkeypatch.setattr(spawn, "get_executable", lambda: "numactl")
    assert not waiting.can_take()


def answer(asked: Connection, said: Connection, turn: Lock) -> None:
    """What a process does that has files and a lock of its parent."""
    with turn:
        said.send_bytes(asked.recv_bytes()[::-1])


def test_files_of_its_parent_come_with_a_process() -> None:
    early = EarlyProcess("pass")
    context = early.context()
    (asks, asked), (hears, said), turn = context.Pipe(), context.Pipe(), context.Lock()
    process = context.Process(target=answer, args=(asked, said, turn))
    process.start()
    for end in (asked, said):
        end.close()
    asks.send_bytes(b"abc")
    assert hears.recv_bytes() == b"cba"
    process.join()
    assert early.used and process.pid == early.pid and process.exitcode == 0


def test_a_process_with_very_many_files_is_spawned() -> None:
    early = EarlyProcess("pass")
    pipes = [multiprocessing.Pipe() for _ in range(MOST_FILES + 1)]
    process = early.context().Process(target=send_each, args=([theirs for _, theirs in pipes],))
    process.start()
    assert [ours.recv_bytes() for ours, _ in pipes] == [bytes([number]) for number in range(len(pipes))]
    process.join()
    assert not early.used and process.pid != early.pid


def send_each(ends: list[Connection]) -> None:
    """Sends the number of each end through it."""
    for number, end in enumerate(ends):
        end.send_bytes(bytes([number]))


def test_processes_are_sent_to_one_early_interpreter_after_the_other() -> None:
    early = [EarlyProcess("pass"), EarlyProcess("raise SystemExit(1)"), EarlyProcess("pass")]
    until(lambda: not early[1].can_take())
    context = EarlyContext(early)
    processes = [context.Process(target=os.getpid) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.pid for process in processes[:2]] == [early[0].pid, early[2].pid]
    assert processes[2].pid not in {each.pid for each in early} and processes[2].exitcode == 0


def test_it_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "from rlframe.utils.process.early import EarlyProcess\n"
        "early = EarlyProcess('pass')\nprint(early.pid, flush=True)\ninput()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    waiting = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until_state(waiting, State.DEAD)


def test_shared_memory_is_gone_when_the_whole_process_group_is_killed() -> None:
    """As Ray kills that of an actor, with vLLM's core and workers in it."""
    program = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from rlframe.utils.process.early import EarlyProcess\n"
        "early = EarlyProcess('pass')\nmemory = SharedMemory(create=True, size=1)\n"
        "print(memory.name, flush=True)\ninput()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert parent.stdout
    memory = Path("/dev/shm", parent.stdout.readline().strip())
    assert memory.is_file()
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not memory.exists())


def test_the_context_makes_what_else_a_spawning_one_makes() -> None:
    context = EarlyProcess("pass").context()
    assert isinstance(context.Event(), type(multiprocessing.get_context("spawn").Event()))
