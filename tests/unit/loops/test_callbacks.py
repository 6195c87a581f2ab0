"""Code of one's own that a run calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlframe.loops.callbacks import Callback, Callbacks
from rlframe.loops.config import CheckpointConfig, LoggingConfig
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.saving.checkpoints import Checkpoints
from rlframe.loops.schedule import Event, Schedule
from rlframe.loops.stop import Stop, Stopped


class Noting(Callback):
    """Notes what it is called with, and asks for the end after a step."""

    def __init__(self, *, last: int | None = None, reason: str = "reward reached"):
        self.noted: list[Any] = []
        self.last, self.reason = last, reason

    def on_start(self, config: Any) -> None:
        """See Callback.on_start."""
        self.noted.append(("start", config))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Callback.on_step."""
        self.noted.append(("step", step, dict(metrics)))
        if step == self.last:
            self.stop(self.reason)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Callback.on_evaluation."""
        self.noted.append(("evaluation", step, dict(metrics)))

    def on_end(self, results: Mapping[str, float]) -> None:
        """See Callback.on_end."""
        self.noted.append(("end", dict(results)))


def log_of(folder: Path, callbacks: Callbacks) -> MetricsLog:
    config = LoggingConfig(tensorboard=False, progress=False)
    return MetricsLog(config, folder, name="it", steps=9, done_steps=None, callbacks=callbacks)


def test_each_gets_what_is_written(tmp_path: Path) -> None:
    first, second = Noting(), Noting()
    log = log_of(tmp_path, Callbacks([first, Callback(), second]))
    log.log_evaluation(0, {"evaluation/reward_mean": 0.25})
    log.log_evaluation(0, {"weight_sync/probe_nats": 0.1})
    log.log(1, {"reward/mean": 0.5})
    log.close()
    assert (
        first.noted
        == second.noted
        == [
            ("evaluation", 0, {"evaluation/reward_mean": 0.25}),
            ("step", 1, {"reward/mean": 0.5, "cluster/restarts": 0.0}),
        ]
    )


def test_what_a_callback_changes_reaches_no_other(tmp_path: Path) -> None:
    class Adding(Callback):
        """Adds a number to what it gets."""

        def on_step(self, step: int, metrics: Any) -> None:
            """See Callback.on_step."""
            metrics["mine"] = 1.0

    noting = Noting()
    log = log_of(tmp_path, Callbacks([Adding(), noting]))
    log.log(1, {"reward/mean": 0.5})
    log.close()
    assert noting.noted == [("step", 1, {"reward/mean": 0.5, "cluster/restarts": 0.0})]


def test_a_start_after_a_death_is_none_and_the_end_has_the_results() -> None:
    noting, results = Noting(), {}
    callbacks = Callbacks([noting])
    callbacks.on_start("config", results)
    callbacks.on_start("config", results)
    results["after/reward_mean"] = 1.0
    callbacks.on_end()
    assert noting.noted == [("start", "config"), ("end", {"after/reward_mean": 1.0})]


def test_an_error_of_a_callback_is_not_caught(tmp_path: Path) -> None:
    class Broken(Callback):
        """Fails."""

        def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
            """See Callback.on_step."""
            raise LookupError("mine")

    log = log_of(tmp_path, Callbacks([Broken()]))
    with pytest.raises(LookupError, match="mine"):
        log.log(1, {})
    log.close()


def run_steps(folder: Path, noting: Noting, *, last_step: int) -> tuple[list[int], Callbacks]:
    """Runs steps that only log. Returns those that were saved."""
    stop, saved = Stop(), []
    callbacks = Callbacks([noting], stop)
    log = log_of(folder, callbacks)
    schedule = Schedule(
        last_step=last_step, every={}, checkpoints=Checkpoints(folder / "checkpoints", CheckpointConfig()), stop=stop
    )
    try:
        schedule.run(0, lambda step: log.log(step, {}), {Event.CHECKPOINT: saved.append})
    finally:
        log.close()
        noting.noted += [("saved", step) for step in saved]
    return saved, callbacks


def test_a_callback_ends_the_run_after_a_step_that_is_saved(tmp_path: Path) -> None:
    noting = Noting(last=2)
    with pytest.raises(Stopped, match="reward reached: saved after step 2 of 9"):
        run_steps(tmp_path, noting, last_step=9)
    assert noting.noted[-1] == ("saved", 2)


def test_what_a_callback_asked_of_an_earlier_run_does_not_end_the_next(tmp_path: Path) -> None:
    noting = Noting()
    for last in (2, 4):
        noting.last = last
        folder = tmp_path / str(last)
        folder.mkdir()
        with pytest.raises(Stopped, match=f"saved after step {last} of 9"):
            run_steps(folder, noting, last_step=9)


def test_an_empty_reason_ends_the_run_too(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="stopped by a callback: saved after step 2 of 9"):
        run_steps(tmp_path, Noting(last=2, reason=""), last_step=9)


def test_a_callback_that_asks_in_the_last_step_leaves_the_end_of_the_run_as_it_is(tmp_path: Path) -> None:
    saved, callbacks = run_steps(tmp_path, Noting(last=2), last_step=2)
    assert saved == [2] and callbacks.asked
