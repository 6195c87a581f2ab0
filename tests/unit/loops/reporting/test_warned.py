"""Warnings of workers in the run's file."""

import json
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlframe.cluster.watch.warned import note_warnings
from rlframe.loops.reporting.warned import FAILURE, Warned
from rlframe.loops.stop import Stopped
from rlframe.utils.errors import OutputError, RewardError
from rlframe.utils.warned import MOST_OF_ONE, OwnWarnings, is_own


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[OwnWarnings]:
    """What a worker with the log `policy-0.log` does."""
    (tmp_path / "logs").mkdir()
    found = note_warnings(tmp_path / "logs" / "policy-0.log")
    yield found
    found.close()


def told(folder: Path) -> list[tuple[int, str, str, str]]:
    """Step, role, module and text of each line."""
    lines = [json.loads(line) for line in (folder / "warnings.jsonl").read_text().splitlines()]
    return [(line["step"], line["role"], line["of"], line["text"]) for line in lines]


@pytest.mark.filterwarnings("ignore")
def test_warnings_of_a_worker_are_gathered_once(worker: OwnWarnings, tmp_path: Path) -> None:
    logging.getLogger("rlframe.megatron").warning("rank %d is slow", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = worker._warned  # noqa: SLF001 - catch_warnings has put back its own
        warnings.warn("a reward is odd", stacklevel=1)
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
    worker.close()
    run = Warned(tmp_path, step=lambda: 4, anew=True)
    run.gather()
    run.gather()
    run.close()
    assert told(tmp_path) == [
        (4, "policy-0", "rlframe.megatron", "rank 3 is slow"),
        (4, "policy-0", "test_warned", "a reward is odd"),
    ]


def test_one_text_does_not_push_out_the_others(worker: OwnWarnings, tmp_path: Path) -> None:
    for _ in range(MOST_OF_ONE + 5):
        worker.note("rlframe", "again")
    worker.note("rlframe", "another")
    worker.close()
    run = Warned(tmp_path, step=lambda: 1, anew=True)
    run.close()
    assert [line[3] for line in told(tmp_path)] == ["again"] * MOST_OF_ONE + ["another"]


def test_what_a_worker_of_an_earlier_program_said_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    line = {"time_s": time.time() - 1e6, "role": "policy-7", "of": "rlframe", "text": "long ago"}
    (tmp_path / "logs" / "policy-7.warnings.jsonl").write_text(json.dumps(line) + "\n{half")
    Warned(tmp_path, step=lambda: 1, anew=True).close()
    assert not (tmp_path / "warnings.jsonl").exists()


@pytest.mark.parametrize(
    ("file", "own"), [(logging.__file__, False), (pytest.__file__, False), (__file__, True), ("/x/reward.py", True)]
)
def test_libraries_are_told_from_ones_own_code(file: str, own: bool) -> None:
    assert is_own(file) is own


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RewardError("no reward scored anything"), ["no reward scored anything"]),
        (Stopped("stopped by Ctrl-C after step 2", 130), ["stopped by Ctrl-C after step 2"]),
        (KeyboardInterrupt(), ["KeyboardInterrupt"]),
        (ZeroDivisionError("division by zero"), ["ZeroDivisionError: division by zero"]),
        (OutputError("the folder belongs to another run"), None),
    ],
)
def test_what_ends_a_run_is_its_last_line(error: BaseException, said: list[str] | None, tmp_path: Path) -> None:
    warned = Warned(tmp_path, step=lambda: 3, anew=True)
    warned.note_failure(error)
    warned.close()
    assert (tmp_path / "warnings.jsonl").exists() == (said is not None)
    assert said is None or told(tmp_path) == [(3, "driver", FAILURE, text) for text in said]
