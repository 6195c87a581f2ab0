"""One process at a time writes to a folder, and a dead one does not keep it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlframe.cluster.watch.sight import State
from rlframe.utils.errors import ConfigError, OutputError
from rlframe.utils.files import lock
from rlframe.utils.files.lock import FolderLock, Holder
from tests.until import PATIENCE_S, until, until_state

ROOT = Path(__file__).parents[4]
HOLD = "import sys, time; from pathlib import Path; from rlframe.utils.files.lock import FolderLock\n"
HOLD += "held = FolderLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds tmp_path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def of_another_host(folder: Path) -> Path:
    """The file of a holder that cannot be seen from here."""
    file = folder / "LOCK-elsewhere-7-1234"
    there = replace(Holder.of_this_process(holds=True), host="elsewhere", pid=7, command="python -m rlframe.main")
    file.write_text(json.dumps(asdict(there)))
    return file


def test_the_second_is_refused_with_the_holders_name_and_the_first_undisturbed(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError) as caught:
        FolderLock(tmp_path)
    message = str(caught.value)
    assert f"output: {tmp_path} is in use by pid {other.pid} on " in message and "for 0 minutes" in message
    assert "python" in message and "output=" in message
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_stopped_holder_keeps_its_folder_and_a_dead_one_does_not(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="is in use"):
        FolderLock(tmp_path)
    # Not waited for: a zombie is dead too.
    other.kill()
    until_state(other.pid, State.DEAD)
    held = FolderLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [held.file.name]
    held.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_number_that_was_used_again_is_not_the_holder(tmp_path: Path) -> None:
    mine = Holder.of_this_process(holds=True)
    assert mine.alive() is True
    assert replace(mine, started="1").alive() is False
    assert replace(mine, machine="another container").alive() is None, "numbers say nothing there"
    assert replace(mine, host="elsewhere").alive() is None


def test_a_holder_on_another_host_is_known_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_S", PATIENCE_S)
    file = of_another_host(tmp_path)
    end = threading.Event()

    def beat() -> None:
        while not end.wait(0.3):
            os.utime(file)

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(ConfigError, match="is in use by pid 7 on elsewhere .*`python -m rlframe.main`"):
        FolderLock(tmp_path)
    end.set()
    heart.join()
    monkeypatch.setattr(lock, "STALE_S", 1.0)
    started = time.monotonic()
    held = FolderLock(tmp_path)
    assert time.monotonic() - started >= 1.0 and not file.exists()
    held.close()


def test_a_garbled_lock_counts_until_it_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_S", 0.5)
    (tmp_path / "LOCK-garbled").write_text("{")
    started = time.monotonic()
    FolderLock(tmp_path).close()
    assert time.monotonic() - started >= 0.5


def test_of_many_that_ask_at_once_exactly_one_gets_it(tmp_path: Path) -> None:
    for _ in range(10):
        held: list[FolderLock] = []
        refused: list[ConfigError] = []

        def ask(held: list[FolderLock] = held, refused: list[ConfigError] = refused) -> None:
            try:
                held.append(FolderLock(tmp_path))
            except ConfigError as error:
                refused.append(error)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 5)
        held[0].close()


def test_a_run_whose_folder_is_taken_or_removed_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    folder = tmp_path / "run"
    folder.mkdir()
    taken = FolderLock(folder)
    taken.check()
    taken.file.unlink()
    with pytest.raises(OutputError, match=f"{folder} is lost to this run: its lock LOCK-.* was removed"):
        until(taken.check)
    taken.close()
    removed = FolderLock(folder)
    folder.rename(tmp_path / "moved")
    with pytest.raises(OutputError, match="it was removed or moved during the run"):
        until(removed.check)
    removed.close()
