"""Trackers, with their real packages where those are installed."""

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlframe.loops.config import LoggingConfig
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.reporting.trackers import trackers
from rlframe.loops.reporting.trackers.base import REMEMBERED, Tracker
from rlframe.utils.errors import ConfigError, SettingError

ROWS = [{"step": 3, "id": "7", "prompt": "1+1?", "response": "2", "reward": 1.0, "finish_reason": "stop"}]
CONFIG = {"seed": 3, "train": {"optimizer": {"lr": 1e-6}}}


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test where the package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the package {package}")


def begun(folder: Path, done_steps: int | None = None, **settings: Any) -> list[Tracker]:
    config = LoggingConfig(tensorboard=False, **settings)
    return list(trackers(config, folder, "mine", CONFIG, done_steps))


def report(folder: Path, steps: range, *, done_steps: int | None = None, **settings: Any) -> None:
    """Reports steps and samples, as a run does."""
    (tracker,) = begun(folder, done_steps, **settings)
    for step in steps:
        tracker(step, {"reward/mean": step / 10})
    tracker.samples(steps[-1], ROWS)
    tracker.close(failed=False)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps what trackers write, and whom they know, out of the home folder."""
    for name in ("HOME", "TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    yield


@needs("wandb")
def test_a_resumed_run_is_the_same_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.INFO):
        report(tmp_path, range(1, 4), wandb_project="p", group="g", tags=["t"])
        report(tmp_path, range(3, 5), done_steps=2, wandb_project="p", group="g", tags=["t"])
    run_id = json.loads((tmp_path / REMEMBERED).read_text())["wandb"]
    folders = [each for each in (tmp_path / "wandb").glob("offline-run-*") if each.is_dir()]
    assert folders and all(each.name.endswith(f"-{run_id}") for each in folders)
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json"))
    assert f"wandb: run mine ({run_id}) offline; `wandb sync " in caplog.text


@needs("wandb")
def test_wandb_without_an_account_is_refused_with_what_to_do(tmp_path: Path) -> None:
    import wandb

    # It reads the environment once.
    wandb.teardown()
    with pytest.raises(ConfigError, match="needs an account of Weights & Biases; run `wandb login` or set"):
        begun(tmp_path, wandb_project="p")


@needs("mlflow")
def test_a_resumed_run_is_the_same_run_of_mlflow(tmp_path: Path) -> None:
    import mlflow

    report(tmp_path, range(1, 4), mlflow_experiment="e", group="g", tags=["t"])
    report(tmp_path, range(4, 6), done_steps=3, mlflow_experiment="e", group="g", tags=["t"])
    (run,) = mlflow.search_runs(experiment_names=["e"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.tags["group"] == "g" and "t" in run.data.tags
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward.mean")
    assert [(each.step, each.value) for each in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]
    files = {each.path for each in mlflow.MlflowClient().list_artifacts(run.info.run_id, "samples")}
    assert files == {"samples/step-00000003.json", "samples/step-00000005.json"}


@needs("mlflow")
def test_a_store_that_mlflow_refuses_is_a_fault_of_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://somewhere")
    with pytest.raises(ConfigError, match="logging.mlflow_experiment: mlflow could not start: .*; set "):
        begun(tmp_path, mlflow_experiment="e")


@needs("trackio")
def test_a_resumed_run_is_the_same_run_of_trackio(tmp_path: Path) -> None:
    import trackio

    report(tmp_path, range(1, 4), trackio_project="p", group="g", tags=["t"])
    report(tmp_path, range(4, 6), done_steps=3, trackio_project="p", group="g", tags=["t"])
    (run,) = trackio.Api().runs("p")
    assert run.name == json.loads((tmp_path / REMEMBERED).read_text())["trackio"] and run.name.startswith("mine-")


def test_tensorboard_has_numbers_and_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = trackers(LoggingConfig(), tmp_path, "mine", CONFIG, None)
    tracker(1, {"reward/mean": 0.5})
    tracker.samples(1, ROWS)
    tracker.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.value for each in events.Scalars("reward/mean")] == [0.5]
    (text,) = events.Tensors("samples/0/text_summary")
    assert '"response": "2"' in text.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wandb_entity": "team"}, "wandb_entity has no effect without wandb_project"),
        ({"group": "g"}, "group has no effect without wandb_project, mlflow_experiment or trackio_project"),
        ({"tags": ["t"]}, "tags has no effect without"),
    ],
)
def test_what_no_tracker_would_show_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        LoggingConfig(**settings)


class Seen:
    """Remembers the steps of tables."""

    def __init__(self) -> None:
        self.tables: list[int] = []

    def samples(self, step: int, rows: list[Any]) -> None:
        """See above."""
        self.tables.append(step)


def test_tables_of_samples_come_every_few_steps_and_with_evaluations(tmp_path: Path) -> None:
    from tests.unit.loops.reporting.test_metrics import rollout

    seen = Seen()
    config = LoggingConfig(tensorboard=False, progress=False, sample_table_every_steps=2)
    log = MetricsLog(config, tmp_path, name="it", steps=4, done_steps=None, trackers=[seen])
    for step in range(1, 5):
        log.log_samples(log.choose_samples(step, [rollout(1, reward=0.0)]))
    log.log_samples(log.choose_samples(5, [rollout(1, reward=0.0)], evaluation="held_out"))
    log.close()
    assert seen.tables == [2, 4, 5]
