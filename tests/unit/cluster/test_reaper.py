"""What a program started is ended after it, however it ended, and what it started before it was watched left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlframe.cluster import reaper
from rlframe.cluster.reaper import lives
from tests.until import PATIENCE_S, until

pytestmark = pytest.mark.later

PROGRAM = """
import fcntl, os, psutil, signal, subprocess, sys, termios, time
from rlframe.cluster.reaper import reaping

def start(code):
    return subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True).pid

def under():
    return [child for child in psutil.Process().children(recursive=True) if child.pid != before]

def unread(pid):
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

def until(moment):
    deadline = time.monotonic() + 120
    while not moment():
        assert time.monotonic() < deadline
        time.sleep(0.05)

deaf, seen = (os.path.join(sys.argv[2], name) for name in ("deaf", "seen"))
before = start("import time; time.sleep(600)")
with reaping(60) as reaper:
    # One is deaf to the signal that asks it to end. The parent of another ends once the reaper has seen both.
    start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({deaf!r}, 'w').close(); time.sleep(600)"
    )
    parent = start(
        "import os, subprocess, time; subprocess.Popen(['sleep', '600'])\\n"
        f"while not os.path.exists({seen!r}): time.sleep(0.05)"
    )
    until(lambda: os.path.exists(deaf) and any(child.name() == "sleep" for child in under()))
    own = [child.pid for child in under()]
    (watcher,) = (child for child in under() if "rlframe.cluster.reaper" in child.cmdline())
    # Between the two beats that it reads it has looked at what is under this process.
    for _ in range(2):
        reaper.beat()
        until(lambda: unread(watcher.pid) == 0)
    open(seen, "w").close()
    until(lambda: psutil.Process(parent).status() == psutil.STATUS_ZOMBIE)
    print(before, *own, flush=True)
    exec(sys.argv[1])
time.sleep(600)
"""
ENDS = ("pass", "os._exit(3)", "raise RuntimeError('no more')", "os.kill(os.getpid(), signal.SIGKILL)")

BEATING = """
import os, sys, time
from rlframe.cluster.reaper import reaping

with reaping(1.0) as reaper:
    beats = 0
    while not os.path.exists(sys.argv[1]):
        reaper.beat()
        time.sleep(0.1)
        beats += 1
        if beats == 20:
            print("beats", flush=True)
    sys.stderr.write("done")
    # Else its end is reported as unexpected, if the test has not read the file by then.
    reaper.leave()
"""


def test_a_driver_that_is_stopped_is_told_once(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    command = [sys.executable, "-c", BEATING, str(tmp_path / "go on")]
    with said.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as program:
        assert program.stdout and program.stdout.readline() == b"beats\n"
        program.send_signal(signal.SIGSTOP)
        until(said.read_text)
        time.sleep(2)
        (tmp_path / "go on").touch()
        program.send_signal(signal.SIGCONT)
    assert program.returncode == 0
    assert said.read_text() == (
        f"the driver (pid {program.pid}) is stopped, and its run only finishes calls already begun; `kill -CONT "
        f"{program.pid}` continues it (cluster.stall_warning_s=1)\ndone"
    )


def test_what_a_program_started_is_ended_however_it_ended(tmp_path: Path) -> None:
    programs = []
    for number, end in enumerate(ENDS):
        (folder := tmp_path / str(number)).mkdir()
        command = [sys.executable, "-c", PROGRAM, end, str(folder)]
        programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    spared: list[int] = []
    try:
        left: list[psutil.Process] = []
        for program in programs:
            assert program.stdout
            before, *own = map(int, program.stdout.readline().split())
            spared.append(before)
            # The deaf one, the one without a parent, that parent, and the reaper.
            assert len(own) == 4
            left += [psutil.Process(pid) for pid in own if psutil.pid_exists(pid)]
        until(lambda: not any(map(lives, left)))
        assert all(lives(psutil.Process(pid)) for pid in spared)
    finally:
        for pid in spared:
            os.kill(pid, signal.SIGKILL)
        for program in programs:
            program.kill()
            program.wait()


SERVED = """
import os, psutil, shutil, subprocess, sys, time
from pathlib import Path
from rlframe.cluster.reaper import reaping

def watched():
    (reaper,) = [child for child in psutil.Process().children() if child.pid != server.pid]
    try:
        return any("pidfd" in os.readlink(handle) for handle in Path(f"/proc/{reaper.pid}/fd").iterdir())
    except OSError:
        return False

def until(moment):
    deadline = time.monotonic() + 120
    while not moment():
        assert time.monotonic() < deadline
        reaper.beat()
        time.sleep(0.1)

shutil.copy("/bin/sleep", "raylet")
with reaping(60.0) as reaper:
    server = subprocess.Popen(["./raylet", "600"])
    until(watched)
    print(os.getpid(), server.pid, flush=True)
    exec(sys.argv[1])
"""
KILLED = "it was killed, perhaps for want of memory (`dmesg` shows that)"


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("server.kill(); until(lambda: not watched()); os._exit(1)", "Ray ends a driver whose raylet (pid {}) died"),
        ("os.kill(os.getpid(), 9)", KILLED),
        ("server.kill(); reaper.leave(); until(lambda: not watched()); os._exit(1)", None),
    ],
    ids=["Ray ends it", "killed", "said its own"],
)
def test_the_end_of_a_driver_that_said_nothing_is_reported(tmp_path: Path, end: str, cause: str | None) -> None:
    done = subprocess.run([sys.executable, "-c", SERVED, end], capture_output=True, text=True, cwd=tmp_path)
    driver, server = done.stdout.split()
    said = f"the driver (pid {driver}) ended unexpectedly: {(cause or '').format(server)}; the same command resumes "
    assert done.stderr == (f"{said}from the last checkpoint, if any\n" if cause else "")


def test_what_a_killed_process_leaves_in_shared_memory_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import signal\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmemory = SharedMemory(create=True, size=1)\n"
        "print(memory.name, flush=True)\nsignal.pause()\n"
    )
    deaf = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert deaf.stdout
    memory = Path("/dev/shm", deaf.stdout.readline().strip())
    assert memory.is_file()
    tracker = psutil.Process(deaf.pid).children()
    kill = psutil.Process.kill

    def kill_and_wait(process: psutil.Process) -> None:
        monkeypatch.setattr(reaper, "PATIENCE_S", PATIENCE_S)
        kill(process)

    monkeypatch.setattr(reaper, "PATIENCE_S", 0.1)
    monkeypatch.setattr(psutil.Process, "kill", kill_and_wait)
    reaper.end({psutil.Process(deaf.pid), *tracker})
    assert deaf.wait() == -9
    until(lambda: not memory.exists())
