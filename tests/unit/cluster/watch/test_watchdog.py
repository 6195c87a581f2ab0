"""The watchdog beside a driver that waits: warnings that name who is late, and an end when the driver cannot end."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch import sight
from rlframe.cluster.watch import watchdog as module
from rlframe.cluster.watch.activities import ACTIVITIES, phase, waiting
from rlframe.cluster.watch.marks import Page
from rlframe.cluster.watch.watchdog import watching
from rlframe.utils.errors import NodeDied, WorkerDied
from tests.until import PATIENCE_S, until

pytestmark = pytest.mark.later


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has all the time it needs to print its stack."""
    monkeypatch.setattr(sight, "ANSWER_S", PATIENCE_S)


RANK = """
import sys, time
from rlframe.cluster.watch.marks import mark
from rlframe.cluster.worker import Worker

class Subject(Worker):
    @staticmethod
    def set_threads(num_threads):
        "Not of torch: nothing here computes, and importing it takes seconds."

    def train(self):
        mark("forward 2 of 4 micro-batches")
        hang_in_a_named_place()

def hang_in_a_named_place():
    time.sleep(600)

rank = Subject(role="policy", rank=int(sys.argv[2]), log_folder=sys.argv[1], num_threads=1)
if sys.argv[3] == "train":
    rank.train()
while True:
    mark("busy")
    time.sleep(0.02)
"""
CONFIG = ClusterConfig(stall_warning_s=0.5, phase_timeout_s=600)
MARKS = {"train": "forward", "busy": "busy"}
"""The beginning of the last mark of a rank, by what it does."""


def has_marked(page: Path, beginning: str) -> bool:
    """Whether the last mark on a page begins so."""
    return page.is_file() and page.stat().st_size > 0 and Page(page).read().text.startswith(beginning)


@contextmanager
def rank(folder: Path, number: int, doing: str) -> Iterator[WorkerInfo]:
    """A process with marks and a log, as the actor of a rank has them."""
    log = folder / f"policy-{number}.log"
    with subprocess.Popen([sys.executable, "-c", RANK, str(folder), str(number), doing]) as process:
        try:
            until(lambda: process.poll() is not None or has_marked(log.with_suffix(".mark"), MARKS[doing]))
            assert process.poll() is None
            yield WorkerInfo(
                role="policy", rank=number, node_id="", host=socket.gethostname(), address="127.0.0.1", pid=process.pid,
                log=str(log),
            )  # fmt: skip
        finally:
            process.kill()


def warnings_while_waiting(folder: Path, workers: list[WorkerInfo], caplog: pytest.LogCaptureFixture) -> str:
    """What the watchdog logs until it has warned of a driver that waits for `workers` in vain."""
    caplog.set_level(logging.WARNING)
    with watching(CONFIG, folder), phase("train"), waiting("train", role="policy", limit_s=600) as activity:
        activity.waits_for = workers
        until(lambda: "made no progress" in caplog.text)
    return caplog.text


def test_a_rank_that_hangs_is_named_with_what_it_did_last_and_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rank(tmp_path, 0, "train") as worker:
        said = warnings_while_waiting(tmp_path, [worker], caplog)
    assert re.search(
        r"train has made no progress for \d+ s \(cluster.stall_warning_s=0.5; its limit is 600 s\); still waiting for ",
        said,
    )
    assert str(worker) in said and "last did 'forward 2 of 4 micro-batches'" in said
    assert "in hang_in_a_named_place" in said


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGSTOP, "is stopped (`kill -CONT"), (signal.SIGKILL, "is dead")]
)
def test_a_rank_that_cannot_answer_is_named_first_though_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int, state: str
) -> None:
    with rank(tmp_path, 0, "busy") as going_on, rank(tmp_path, 1, "busy") as victim:
        os.kill(victim.pid, number)
        said = warnings_while_waiting(tmp_path, [going_on, victim], caplog)
    first = next(line for line in said.splitlines() if "made no progress" in line)
    assert f"still waiting for {victim}, which {state}" in first and first.rstrip().endswith(str(going_on))


def test_ranks_that_go_on_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Who marks is this process: what stops it stops the watchdog too, and is no lack of progress.
    worker = WorkerInfo(
        role="policy", rank=0, node_id="", host=socket.gethostname(), address="127.0.0.1", pid=os.getpid(),
        log=str(tmp_path / "policy-0.log"),
    )  # fmt: skip
    page = Page(tmp_path / "policy-0.mark", create=True)
    with watching(CONFIG, tmp_path), waiting("train", role="policy", limit_s=600) as activity:
        activity.waits_for = [worker]
        begun = last = time.monotonic()
        longest_s = 0.0
        while last - begun < 4 * CONFIG.stall_warning_s:
            page.write("busy", num_calls=1)
            time.sleep(0.01)
            before, last = last, time.monotonic()
            longest_s = max(longest_s, last - before)
    # A machine may have kept this thread from its marks for that long.
    assert "no progress" not in caplog.text or longest_s >= CONFIG.stall_warning_s


def test_a_driver_that_hangs_itself_shows_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with watching(CONFIG, tmp_path), phase("reward"):
        until(lambda: "reward has made no progress" in caplog.text)
    assert "the driver itself is late" in caplog.text
    assert "test_a_driver_that_hangs_itself_shows_where" in caplog.text


def test_the_time_of_a_start_is_not_the_phases(tmp_path: Path) -> None:
    with watching(CONFIG, tmp_path), phase("rollout") as around:
        with waiting("restart", role="rollout", limit_s=60, start_limit_s=30) as start:
            assert (start.limit_s, start.setting) == (30, "cluster.start_timeout_s")
            time.sleep(0.3)
        took_s = around.took_s()
        assert 0 <= took_s <= time.monotonic() - around.begun_s - 0.3


def test_a_second_phase_is_limited_by_the_first(tmp_path: Path) -> None:
    with watching(ClusterConfig(stall_warning_s=0.01, phase_timeout_s=60), tmp_path):
        with phase("train") as first:
            time.sleep(0.2)
        took_s = first.took_s()
        with phase("train") as second:
            pass
        with phase("rollout") as other:
            pass
    # Ten times 0.2 s and a little; the first of each has the ceiling.
    assert first.limit_s == other.limit_s == 60 and 2 <= second.limit_s <= min(10 * took_s, 60)
    assert ACTIVITIES.limits.of("train") == float("inf"), "what was learnt ends with the run"


BLOCKED = """
import sys, time
from pathlib import Path
from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.watch import watchdog
from rlframe.cluster.watch.activities import phase
import subprocess
watchdog.PATIENCE_S = 0.5
subprocess.Popen(["sleep", "300"])
with watchdog.watching(ClusterConfig(stall_warning_s=0.1, phase_timeout_s=1), Path(sys.argv[1])):
    with phase("weight_sync"):
        time.sleep(300)
"""
LINGERING = """
import sys, time
from pathlib import Path
from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.watch import watchdog
from rlframe.utils.errors import WorkerDied
watchdog.END_S = 0.5
with watchdog.watching(ClusterConfig(stall_warning_s=0.1, phase_timeout_s=1), Path(sys.argv[1])) as dog:
    try:
        with watchdog.work(dog):
            raise WorkerDied("policy rank 1 died in train")
    finally:
        time.sleep(300)
"""

STEPS = """
        while not Path(sys.argv[1], "go on").exists():
            time.sleep(0.01)
"""
WITHOUT_A_TURN = """
import re, sys, threading
from pathlib import Path
from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.watch import watchdog
config = ClusterConfig(stall_warning_s=0.1, phase_timeout_s=2, start_timeout_s=2)
with watchdog.watching(config, Path(sys.argv[1])) as dog:
    # It has looked more than once.
    looks = threading.Semaphore(0)
    dog.beat = looks.release
    for _ in range(3):
        looks.acquire(timeout=60)
    re.match("(a+)+b", "a" * 60)
"""


def test_a_call_in_c_that_keeps_pythons_lock_is_ended_with_its_stack(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_A_TURN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr and "in match" in done.stderr, done.stderr


def test_a_driver_that_was_stopped_blames_nobody_for_it(tmp_path: Path) -> None:
    program = BLOCKED.replace("phase_timeout_s=1", "phase_timeout_s=6").replace("        time.sleep(300)", STEPS)
    program = program.replace('subprocess.Popen(["sleep", "300"])', "")
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE, text=True) as driver:
        until(lambda: driver.poll() is not None or has_marked(tmp_path / "driver.mark", "weight_sync"))
        os.kill(driver.pid, signal.SIGSTOP)
        time.sleep(10)
        os.kill(driver.pid, signal.SIGCONT)
        assert driver.stderr
        said = driver.stderr.readline()
        (tmp_path / "go on").touch()
        said += driver.communicate(timeout=PATIENCE_S)[1]
    # It took 10 s and more with a limit of 6.5 s, and 10 s of that do not count.
    assert driver.returncode == 0 and f"the driver (pid {driver.pid}) was stopped" in said, said


STOPPED = LINGERING.replace('WorkerDied("policy rank 1 died in train")', 'Stopped("stopped by SIGTERM: saved", 143)')
STOPPED = STOPPED.replace("rlframe.utils.errors import WorkerDied", "rlframe.loops.stop import Stopped")
# As of a signal to the process group of the run, of which a server of Ray is.
CUT_OFF = STOPPED.replace("END_S = 0.5", "CUT_OFF_S = 0.1").replace(
    "            raise",
    """            from pathlib import Path
            from subprocess import Popen
            from rlframe.cluster.watch.sight import State, process_state
            raylet = Path(sys.argv[1], "raylet")
            raylet.symlink_to("/bin/true")
            server = Popen([str(raylet)])
            while process_state(server.pid) is not State.DEAD:
                time.sleep(0.01)
            raise""",
)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (STOPPED, "did not end within 0.5 s: no process of it is stopped"),
        (CUT_OFF, r"cannot end: dead: raylet \(pid \d+\)"),
    ],
    ids=["Ray hangs", "Ray died of the same signal"],
)
def test_a_stop_that_ray_does_not_outlive_is_told_in_its_own_sentence(tmp_path: Path, program: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 143, done.stderr
    words = rf"stopped by SIGTERM: saved\nthe run is over, and Ray {says}; left without it\n$"
    assert re.search(words, done.stderr) and "Traceback" not in done.stderr, done.stderr


def test_the_work_of_all_descendants_is_that_of_a_process() -> None:
    # As of vLLM's workers with tp above 1, which an engine's core has started.
    program = "while True: pass"
    for _ in range(2):
        program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", program]) as actor:
        family = psutil.Process(actor.pid)
        try:
            until(lambda: len(family.children(recursive=True)) == 2)
            *_, worker = family.children(recursive=True)
            until(lambda: sum(worker.cpu_times()[:2]) > 0.5)
            assert sight.cpu_seconds(actor.pid) >= 0.5
        finally:
            for each in family.children(recursive=True):
                each.kill()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            BLOCKED,
            "weight_sync took longer than 1 s (cluster.phase_timeout_s), and the driver cannot end it; the driver ",
        ),
        (LINGERING, "policy rank 1 died in train\nthe run is over, and Ray did not end within 0.5 s"),
    ],
    ids=["in a phase", "at the end"],
)
def test_a_driver_that_cannot_end_is_ended_with_last_words(tmp_path: Path, program: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr


def test_patience_is_longer_than_a_report_takes() -> None:
    # A group's own report looks at its workers: 1.5 s here, REMOTE_S elsewhere.
    from rlframe.cluster.watch.looking import REMOTE_S

    assert module.PATIENCE_S > REMOTE_S + 2


def test_who_asks_by_a_signal_is_told_who_waits_for_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rank(tmp_path, 0, "train") as worker, watching(ClusterConfig(), tmp_path) as watchdog, ExitStack() as stack:
        activity = stack.enter_context(waiting("train", role="policy", limit_s=60))
        activity.waits_for = [worker]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watchdog.asked.wait(PATIENCE_S)
        until(lambda: "report requested by SIGUSR1" in caplog.text)
    assert (
        "report requested by SIGUSR1: train has taken" in caplog.text and f"still waiting for {worker}" in caplog.text
    )
    assert "in hang_in_a_named_place" in caplog.text
    os.kill(os.getpid(), signal.SIGUSR1)  # after the run it does nothing


def test_the_signal_is_heard_while_the_main_thread_hangs_in_c(tmp_path: Path) -> None:
    program = """
import ctypes, sys
from pathlib import Path
from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.watch.activities import phase
from rlframe.cluster.watch.watchdog import watching
with watching(ClusterConfig(), Path(sys.argv[1])), phase("reward"):
    print("hangs", flush=True)
    lock = ctypes.create_string_buffer(64)
    while True:
        # The second time it waits for itself, and no signal makes it return.
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout and driver.stderr
        driver.stdout.readline()
        driver.send_signal(signal.SIGUSR1)
        assert driver.stderr.readline().startswith("report requested by SIGUSR1: reward has taken")
        driver.kill()


def test_ray_has_longer_to_end_after_the_loss_of_a_node() -> None:
    lost, died = NodeDied("the Ray cluster has lost node-b"), WorkerDied("policy rank 1 died in train")
    assert module.leave_s(lost) == 4 * module.leave_s(died) == 4 * module.leave_s(None)
