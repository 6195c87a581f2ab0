"""A checkpoint is complete or it is not there."""

import json
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rlframe.loops import checkpointing
from rlframe.loops.checkpointing import CRITIC, MARKER, STATE, TRAINING, Checkpoints, RunState, read_state, score
from rlframe.loops.run import CheckpointConfig
from rlframe.utils.errors import CheckpointError, RlframeError


def state(step: int, value: float | None = None) -> RunState:
    """The state after `step` steps, with something in every field."""
    return RunState(
        step=step, num_optimizer_steps=2 * step, data={"epoch": 1, "seen": [3, 4]}, results={"a": 0.1}, score=value
    )


def config(**settings: Any) -> CheckpointConfig:
    """The settings of a test."""
    return CheckpointConfig(**settings)


def write(folder: pathlib.Path) -> Callable[[], dict[str, float]]:
    """Stands for the training state: a file and a folder with a file."""
    (folder / "rank-0").write_bytes(b"weights")

    def rest() -> dict[str, float]:
        (folder / "parts").mkdir()
        (folder / "parts" / "1").write_bytes(b"moments")
        return {"time/checkpoint_write_s": 2.0}

    return rest


def die(folder: pathlib.Path) -> Callable[[], dict[str, float]]:
    """A crash after half the training state."""
    (folder / "rank-0").write_bytes(b"wei")
    raise KeyboardInterrupt


def test_a_saved_checkpoint_reads_back(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=2))
    assert checkpoints.latest() is None, "not even the folder is there"
    path = checkpoints.save(state(5), write)
    assert checkpoints.latest() == path
    assert read_state(path) == state(5)
    assert (path / TRAINING / "parts" / "1").read_bytes() == b"moments"


def test_a_further_model_is_staged_once_the_first_is_written(tmp_path: pathlib.Path) -> None:
    # Where models share devices, what the first writes from may be gone when the second has been made room for.
    order: list[str] = []

    def stage(folder: pathlib.Path) -> Callable[[], dict[str, float]]:
        order.append(f"stage {folder.name}")
        rest = write(folder)

        def finish() -> dict[str, float]:
            order.append(f"write {folder.name}")
            return rest()

        return finish

    checkpoints = Checkpoints(tmp_path, config())
    path = checkpoints.save(state(1), stage, beside={CRITIC: stage})
    assert order == ["stage training", "write training", "stage critic", "write critic"]
    assert all((path / name / "parts" / "1").read_bytes() == b"moments" for name in (TRAINING, CRITIC))
    assert checkpoints.metrics()["time/checkpoint_write_s"] == 4.0
    order.clear()
    background = Checkpoints(tmp_path, config(asynchronous=True))
    background.save(state(2), stage, beside={CRITIC: stage})
    background.finish()
    assert order == ["stage training", "stage critic", "write training", "write critic"]


def test_a_crash_before_the_marker_leaves_the_older_checkpoint(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=1))
    first = checkpoints.save(state(1), write)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(2), die)
    assert checkpoints.latest() == first and read_state(first) == state(1)
    # The step is made again after the resume; nothing of the torn attempt is left in it.
    again = checkpoints.save(state(2), write)
    assert checkpoints.latest() == again
    assert (again / TRAINING / "rank-0").read_bytes() == b"weights"


def test_a_crash_while_a_complete_step_is_saved_again_does_not_leave_it_looking_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=2))
    first, second = checkpoints.save(state(1), write), checkpoints.save(state(2), write)

    def tear(path: pathlib.Path, **_: object) -> None:
        (pathlib.Path(path) / STATE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", tear)
        checkpoints.save(state(2), write)
    assert second.is_dir() and checkpoints.latest() == first


def test_older_checkpoints_are_removed_after_the_newer_is_complete(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=2))
    for step in (1, 2, 9, 10):
        checkpoints.save(state(step), write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(11), die)
    assert [read_state(path).step for path in checkpoints._complete()] == [9, 10]


def test_the_newest_is_the_highest_step_not_the_last_written(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=5))
    for step in (100, 20, 3):
        checkpoints.save(state(step), write)
    latest = checkpoints.latest()
    assert latest is not None and read_state(latest).step == 100


def test_a_half_deleted_checkpoint_does_not_look_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=1))
    first = checkpoints.save(state(1), write)

    def tear(path: pathlib.Path, **_: object) -> None:
        if path == first:
            (first / STATE).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", tear)
        checkpoints.save(state(2), write)
    assert first.is_dir() and not (first / MARKER).exists()
    latest = checkpoints.latest()
    assert latest is not None and read_state(latest).step == 2


def test_everything_is_on_the_disk_before_the_marker_and_the_marker_before_anything_is_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=1))
    old = checkpoints.save(state(1), write)
    events: list[pathlib.Path] = []
    real = checkpointing.sync

    def sync(path: pathlib.Path) -> None:
        assert path == old or (old / MARKER).exists(), "the older one must stay until the newer is on the disk"
        events.append(path)
        real(path)

    monkeypatch.setattr(checkpointing, "sync", sync)
    path = checkpoints.save(state(2), write)
    marker = events.index(path / MARKER)
    written = {file for file in path.rglob("*")} - {path / MARKER}
    assert written == set(events[:marker]), "files and the folders that list them"
    then = events[marker + 1 :]
    assert then == [path, tmp_path, old], "the folders that list the marker and the checkpoint, then the one that goes"


class Slow:
    """A training state whose writing waits for a word, and then fails or not."""

    def __init__(self, failure: Exception | None = None):
        self.go = threading.Event()
        self.failure = failure

    def __call__(self, folder: pathlib.Path) -> Callable[[], dict[str, float]]:
        finish = write(folder)

        def rest() -> dict[str, float]:
            assert self.go.wait(30)
            if self.failure:
                raise self.failure
            return finish()

        return rest


def test_a_save_in_the_background_counts_only_when_it_is_done(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=1, asynchronous=True))
    results = {"a": 0.1}
    first = checkpoints.save(state(1), write)
    checkpoints.finish()
    slow = Slow()
    now = RunState(step=2, num_optimizer_steps=4, data={}, results=results)
    second = checkpoints.save(now, slow)
    results["a"] = 9.9  # the run has gone on
    checkpoints.check()
    assert checkpoints.latest() == first, "what a crash would go on from"
    slow.go.set()
    checkpoints.finish()
    assert checkpoints.latest() == second and not first.exists()
    assert read_state(second).results == {"a": 0.1}
    assert (second / TRAINING / "parts" / "1").read_bytes() == b"moments"
    metrics = checkpoints.metrics()
    assert metrics.pop("time/checkpoint_stage_s") >= 0 and metrics == {"time/checkpoint_write_s": 2.0}
    assert checkpoints.metrics() == {}, "logged once"


def test_the_next_save_waits_for_the_one_in_the_background(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=2, asynchronous=True))
    slow = Slow()
    first = checkpoints.save(state(1), slow)
    threading.Timer(0.2, slow.go.set).start()
    checkpoints.save(state(2), lambda folder: write(folder) if (first / MARKER).exists() else die(folder))
    checkpoints.finish()
    assert [read_state(path).step for path in checkpoints._complete()] == [1, 2]


def test_a_failure_in_the_background_stops_the_run_with_a_sentence(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=1, asynchronous=True))
    first = checkpoints.save(state(1), write)
    checkpoints.finish()
    slow = Slow(CheckpointError("rank-0 is truncated"))
    checkpoints.save(state(2), slow)
    checkpoints.check()
    slow.go.set()
    background = checkpoints._background
    assert background is not None
    background.join()
    with pytest.raises(RlframeError, match="could not be written in the background: rank-0 is truncated"):
        checkpoints.check()
    assert checkpoints.latest() == first


def test_the_best_are_kept_besides_the_last(tmp_path: pathlib.Path) -> None:
    scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.2, 7: None}
    most = Checkpoints(tmp_path / "max", config(keep_last=2, keep_best=2, best_metric="m"))
    least = Checkpoints(tmp_path / "min", config(keep_last=1, keep_best=2, best_metric="m", best_mode="min"))
    for step, value in scores.items():
        most.save(state(step, value), write)
        least.save(state(step, value), write)
    # Worked by hand: the two best of 0.5 0.9 - 0.9 0.1 0.2 - by either mode, and the last two, or one.
    assert [read_state(path).step for path in most._complete()] == [2, 4, 6, 7]
    assert [read_state(path).step for path in least._complete()] == [5, 6, 7]
    assert sorted(path.name for path in (tmp_path / "min").iterdir()) == [
        f"step-0000000{step}" for step in (5, 6, 7)
    ]  # fmt: skip


def test_what_a_crash_left_half_written_or_half_deleted_is_removed_by_a_later_save(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, config(keep_last=1))
    torn = checkpoints.save(state(1), write)
    (torn / MARKER).unlink()
    last = checkpoints.save(state(2), write)
    assert list(tmp_path.iterdir()) == [last]


def test_the_score_is_that_of_the_checkpoints_own_step() -> None:
    best = config(keep_best=1, best_metric="evaluation/reward_mean")
    assert score(config(), {"evaluation/reward_mean": 1.0}, {"evaluation/reward_mean"}) is None
    assert score(best, {"evaluation/reward_mean": 1.0}, {"evaluation/reward_mean"}) == 1.0
    assert score(best, {"train/loss": 1.0}, {"evaluation/reward_mean", "train/loss"}) is None
    with pytest.raises(RlframeError, match="got 'evaluation/reward_mean'; measured were reward/mean, train/loss"):
        score(best, {}, {"train/loss", "reward/mean"})


def test_a_checkpoint_of_an_earlier_version_has_no_score(tmp_path: pathlib.Path) -> None:
    path = Checkpoints(tmp_path, config()).save(state(1), write)
    plain = json.loads((path / STATE).read_text())
    del plain["score"]
    (path / STATE).write_text(json.dumps(plain))
    assert read_state(path).score is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": 1}, "best_metric must be given with keep_best=1"),
        ({"best_metric": "train/loss"}, "best_metric must be left out unless keep_best is at least 1"),
        ({"keep_best": -1}, "keep_best must be at least 0"),
        ({"export_every_steps": -1}, "export_every_steps must be at least 0"),
        ({"export_shard_gb": 0.0}, "export_shard_gb must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)
