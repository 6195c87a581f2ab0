"""Trackers on threads of their own: nothing of theirs holds up a step."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlframe.loops.reporting import uploads
from rlframe.loops.reporting.uploads import Uploads
from rlframe.utils.errors import ConfigError, OutputError, RlframeError


class Tracker:
    """Writes down what it gets, and on which thread."""

    def __init__(self, *, after: threading.Event | None = None):
        self.after, self.got, self.threads = after, [], {threading.get_ident()}

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Waits for `after` first."""
        if self.after:
            self.after.wait(600)
        self.got.append((step, dict(metrics)))
        self.threads.add(threading.get_ident())

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See above."""
        self.got.append((step, list(rows)))

    def close(self, *, failed: bool) -> None:
        """See above."""
        self.threads.add(threading.get_ident())
        self.got.append("failed" if failed else "closed")


def test_everything_gets_there_in_order_on_one_thread() -> None:
    made: list[Tracker] = []
    log = Uploads("wandb", lambda: made.append(Tracker()) or made[0])
    for step in range(3):
        log(step, {"x": float(step)})
    log.close()
    assert made[0].got == [(0, {"x": 0.0}), (1, {"x": 1.0}), (2, {"x": 2.0}), "closed"]
    assert len(made[0].threads) == 1 and threading.get_ident() not in made[0].threads


def test_a_server_that_hangs_holds_up_neither_the_steps_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads, "MOST_WAITING", 5)
    answer = threading.Event()
    log = Uploads("mlflow", lambda: Tracker(after=answer), close_s=0.4)
    begun = time.monotonic()
    for step in range(20):
        log(step, {})
    assert log.num_left_out >= 14
    log.close()
    assert time.monotonic() - begun < 300, "the server hangs for 600 s"
    answer.set()
    assert "mlflow gets no metrics from step" in caplog.text and "metrics.jsonl has all" in caplog.text
    assert "mlflow lacks about" in caplog.text and "did not accept them within 0.4 s" in caplog.text


def test_a_tracker_that_fails_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def broken(step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("no route")

    log = Uploads("wandb", lambda: broken)
    log(1, {})
    log.join(120)
    log(2, {})
    log.close()
    assert (
        "wandb gets no metrics from step 2 on: it failed: ConnectionError: no route; metrics.jsonl has all"
        in caplog.text
    )


def test_an_end_that_cannot_be_written_is_told_in_the_words_of_the_error(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Tracker):
        """Cannot write its end."""

        def close(self, *, failed: bool) -> None:
            """See above."""
            raise OutputError("report.html cannot be written: the disk is full")

    log = Uploads("report.html", Full)
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "report.html lacks the end of the run: report.html cannot be written: the disk is full; metrics.jsonl has all"
    ]


def test_a_tracker_that_cannot_begin_ends_the_start() -> None:
    hangs = threading.Event()
    with pytest.raises(RlframeError, match="wandb did not start within 0.1 s"):
        Uploads("wandb", lambda: hangs.wait(600), start_s=0.1)
    hangs.set()

    def refused() -> None:
        raise ConnectionError("no route to host")

    setting = "logging.mlflow_experiment"
    with pytest.raises(ConfigError, match=f"{setting}: mlflow could not start: ConnectionError: no route to host; "):
        Uploads("mlflow", refused, setting=setting)


def test_samples_and_a_failed_end_get_there_too() -> None:
    made: list[Tracker] = []
    log = Uploads("wandb", lambda: made.append(Tracker()) or made[0])
    log.samples(1, [{"prompt": "p"}])
    log.close(failed=True)
    assert made[0].got == [(1, [{"prompt": "p"}]), "failed"]
