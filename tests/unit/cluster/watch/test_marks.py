"""A page of marks: what one process writes, another reads, while it is alive, stopped or dead."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlframe.cluster.watch.marks import MOST_BYTES, Page
from rlframe.cluster.watch.sight import State
from tests.until import until, until_state

WRITER = """
import sys, time
from pathlib import Path
from rlframe.cluster.watch.marks import begin_marks, mark
begin_marks(Path(sys.argv[1]))
for number in range(10**9):
    mark(f"step {number} " + "x" * (number % 50))
"""


def test_a_reader_sees_the_newest_mark(tmp_path: Path) -> None:
    writer = Page(tmp_path / "a.mark", create=True)
    reader = Page(tmp_path / "a.mark")
    assert reader.read().number == 0 and reader.read().text == ""
    writer.write("train: begun", num_calls=1)
    begun_s = time.monotonic()
    writer.write("forward 1 of 4", num_calls=1)
    seen = reader.read()
    # Two numbers a mark: odd while it is written, even when it is there.
    assert (seen.number, seen.text, seen.num_calls) == (4, "forward 1 of 4", 1)
    assert begun_s <= seen.at_s <= time.monotonic()


def test_a_long_mark_is_cut(tmp_path: Path) -> None:
    page = Page(tmp_path / "a.mark", create=True)
    page.write("y" * 5000, num_calls=0)
    assert page.read().text == "y" * MOST_BYTES


def test_a_new_process_begins_a_new_page(tmp_path: Path) -> None:
    old = Page(tmp_path / "a.mark", create=True)
    old.write("of the one that died", num_calls=0)
    assert Page(tmp_path / "a.mark", create=True).read().text == ""
    assert old.read().text == "of the one that died"


def test_there_is_no_page_to_read_where_nobody_wrote(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Page(tmp_path / "none.mark")


def test_records_are_asked_for_and_answered(tmp_path: Path) -> None:
    rank, driver = Page(tmp_path / "a.mark", create=True), Page(tmp_path / "a.mark")
    assert driver.request() == 1 and rank.requests() == (1, 0)
    rank.answer(1)
    assert driver.requests() == (1, 1)


def test_marks_are_whole_while_they_are_written_and_stay_when_the_writer_is_stopped_and_killed(tmp_path: Path) -> None:
    file = tmp_path / "a.mark"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(file)]) as process:
        try:
            until(
                lambda: (
                    process.poll() is not None or (file.is_file() and file.stat().st_size and Page(file).read().number)
                )
            )
            page = Page(file)
            for _ in range(2000):
                _, number, tail = [*page.read().text.split(" "), ""][:3]
                assert tail == "x" * (int(number) % 50)
            os.kill(process.pid, signal.SIGSTOP)
            until_state(process.pid, State.STOPPED)
            last = page.read()
            time.sleep(0.05)
            assert page.read() == last
        finally:
            process.kill()
    assert page.read() == last and last.text.startswith("step ")
