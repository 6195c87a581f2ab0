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

    def __init__(self, *, last: int | None = None):
        self.noted: list[Any] = []
        self.last = last

    def on_start(self, config: Any) -> None:
        """See Callback.on_start."""
        self.noted.append(("start", config))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Callback.on_step."""
        self.noted.append(("step", step, dict(metrics)))
        if step == self.last:
            self.stop("reward reached")

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


def test_a_callback_ends_the_run_after_a_step_that_is_saved(tmp_path: Path) -> None:
    stop, saved = Stop(), []
    callbacks = Callbacks([Noting(last=2)], stop)
    log = log_of(tmp_path, callbacks)
    schedule = Schedule(
        last_step=9, every={}, checkpoints=Checkpoints(tmp_path / "checkpoints", CheckpointConfig()), stop=stop
    )
    with pytest.raises(Stopped, match="reward reached: saved after step 2 of 9"):
        schedule.run(0, lambda step: log.log(step, {}), {Event.CHECKPOINT: saved.append})
    log.close()
    assert saved == [2] and callbacks.asked
