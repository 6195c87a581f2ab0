"""A checkpoint is complete or it is not there."""

import json
import math
import pathlib
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlframe.cluster.roles import CRITIC
from rlframe.loops.config import CheckpointConfig
from rlframe.loops.saving import checkpoints as checkpointing
from rlframe.loops.saving.checkpoints import STATE, TRAINING, Checkpoints, RunState, read_state, require_measured
from rlframe.loops.saving.manifest import COMPLETE, RUN, claim_owner, named_checkpoints, seal
from rlframe.utils.errors import CheckpointError, ConfigError, OutputError, RlframeError
from rlframe.utils.files.sealed import read_sealed, write_sealed


def state(step: int, value: float | None = None) -> RunState:
    """The state after `step` steps, with something in every field."""
    return RunState(
        step=step, num_optimizer_steps=2 * step, data={"epoch": 1, "seen": [3, 4]}, results={"a": 0.1}, score=value
    )


def config(**settings: Any) -> CheckpointConfig:
    """The settings of a test."""
    return CheckpointConfig(**settings)


@pytest.fixture(autouse=True)
def owner(tmp_path: pathlib.Path) -> None:
    """tmp_path is the folder of a run."""
    claim_owner(tmp_path, "digest")


def steps(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in a folder that are whole and of its run, in order."""
    return sorted(
        read_state(path).step for path in named_checkpoints(folder) if not Checkpoints(folder, config())._fault(path)
    )


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

    checkpoints = Checkpoints(tmp_path / "checkpoints", config())
    path = checkpoints.save(state(1), stage, auxiliary={CRITIC: stage})
    assert order == ["stage training", "write training", "stage critic", "write critic"]
    assert all((path / name / "parts" / "1").read_bytes() == b"moments" for name in (TRAINING, CRITIC))
    assert checkpoints.metrics()["time/checkpoint_write_s"] == 4.0
    order.clear()
    background = Checkpoints(tmp_path / "checkpoints", config())
    background.save(state(2), stage, auxiliary={CRITIC: stage}, background=True)
    background.finish()
    assert order == ["stage training", "stage critic", "write training", "write critic"]


def test_a_crash_before_the_end_leaves_the_older_checkpoint(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    first = checkpoints.save(state(1), write)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(2), die)
    assert checkpoints.latest() == first and read_state(first) == state(1)
    # The step is made again after the resume; nothing of the torn attempt is left in it.
    again = checkpoints.save(state(2), write)
    assert checkpoints.latest() == again
    assert (again / TRAINING / "rank-0").read_bytes() == b"weights"


def test_older_checkpoints_are_removed_after_the_newer_is_complete(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=2))
    for step in (1, 2, 9, 10):
        checkpoints.save(state(step), write)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-00000009", "step-00000010"]
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(11), die)
    assert steps(checkpoints.folder) == [9, 10]


def test_the_newest_is_the_highest_step_not_the_last_written(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=5))
    for step in (100, 20, 3):
        checkpoints.save(state(step), write)
    latest = checkpoints.latest()
    assert latest is not None and read_state(latest).step == 100


def test_a_half_deleted_checkpoint_does_not_look_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    first = checkpoints.save(state(1), write)

    def tear(path: pathlib.Path, **_: object) -> None:
        if "removed" in path.name:
            (path / STATE).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", tear)
        checkpoints.save(state(2), write)
    assert not first.exists()
    latest = checkpoints.latest()
    assert latest is not None and read_state(latest).step == 2


def test_everything_is_on_the_disk_before_the_name_is_there_and_only_then_is_anything_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    old, new = checkpoints.save(state(1), write), checkpoints.folder / "step-00000002"
    synced: set[pathlib.Path] = set()
    real, real_seal = checkpointing.sync, checkpointing.seal

    def sync(path: pathlib.Path) -> None:
        synced.add(path)
        assert old.exists() or new.exists(), "the older one must stay until the newer is on the disk"
        real(path)

    def sealing(path: pathlib.Path, *rest: Any, **more: Any) -> None:
        assert set(path.rglob("*")) | {path} == synced, "files and the folders that list them"
        assert old.exists() and not new.exists()
        real_seal(path, *rest, **more)

    monkeypatch.setattr(checkpointing, "sync", sync)
    monkeypatch.setattr(checkpointing, "seal", sealing)
    checkpoints.save(state(2), write)
    assert new.exists() and not old.exists()


class Slow:
    """A training state whose writing waits for a word, and then fails or not."""

    def __init__(self, failure: Exception | None = None):
        self.go = threading.Event()
        self.failure = failure

    def __call__(self, folder: pathlib.Path) -> Callable[[], dict[str, float]]:
        finish = write(folder)

        def rest() -> dict[str, float]:
            assert self.go.wait(300)
            if self.failure:
                raise self.failure
            return finish()

        return rest


def test_a_save_in_the_background_counts_only_when_it_is_done(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    results = {"a": 0.1}
    first = checkpoints.save(state(1), write, background=True)
    checkpoints.finish()
    slow = Slow()
    now = RunState(step=2, num_optimizer_steps=4, data={}, results=results)
    second = checkpoints.save(now, slow, background=True)
    results["a"] = 9.9  # the run has gone on
    checkpoints.check()
    assert checkpoints.latest() == first, "what a crash would go on from"
    slow.go.set()
    checkpoints.finish()
    assert checkpoints.latest() == second and not first.exists()
    assert read_state(second).results == {"a": 0.1}
    assert (second / TRAINING / "parts" / "1").read_bytes() == b"moments"
    metrics = checkpoints.metrics()
    assert metrics.pop("time/checkpoint_stage_s") >= 0 and metrics.pop("time/checkpoint_background_s") > 0
    assert metrics == {"time/checkpoint_write_s": 2.0}
    assert checkpoints.metrics() == {}, "logged once"


def test_the_next_save_waits_for_the_one_in_the_background(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=2))
    slow = Slow()
    first = checkpoints.save(state(1), slow, background=True)
    threading.Timer(0.2, slow.go.set).start()
    checkpoints.save(
        state(2),
        lambda folder: write(folder) if (first / COMPLETE).exists() else die(folder),
        background=True,
    )
    checkpoints.finish()
    assert steps(checkpoints.folder) == [1, 2]


def test_a_failure_in_the_background_stops_the_run_with_a_sentence(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    first = checkpoints.save(state(1), write, background=True)
    checkpoints.finish()
    slow = Slow(CheckpointError("rank-0 is truncated"))
    checkpoints.save(state(2), slow, background=True)
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
    for name in ("max", "min"):
        (tmp_path / name).mkdir()
        claim_owner(tmp_path / name, "digest")
    most = Checkpoints(tmp_path / "max/checkpoints", config(keep_last=2, keep_best=2, best_metric="m"))
    least = Checkpoints(
        tmp_path / "min/checkpoints", config(keep_last=1, keep_best=2, best_metric="m", best_mode="min")
    )
    for step, value in scores.items():
        most.save(state(step, value), write)
        least.save(state(step, value), write)
    # Worked by hand: the two best of 0.5 0.9 - 0.9 0.1 0.2 - by either mode, and the last two, or one.
    assert steps(most.folder) == [2, 4, 6, 7]
    assert steps(least.folder) == [5, 6, 7]
    assert sorted(path.name for path in least.folder.iterdir()) == [f"step-0000000{step}" for step in (5, 6, 7)]


def test_scores_of_another_metric_are_not_compared(tmp_path: pathlib.Path) -> None:
    former = Checkpoints(tmp_path / "checkpoints", config(keep_last=1, keep_best=1, best_metric="tokens"))
    for step, value in ((1, 212.0), (2, 180.0)):
        former.save(state(step, value), write)
    resumed = Checkpoints(tmp_path / "checkpoints", config(keep_last=1, keep_best=1, best_metric="reward"))
    for step, value in ((3, 0.61), (4, 0.93), (5, 0.55)):
        resumed.save(state(step, value), write)
    assert steps(resumed.folder) == [4, 5]


@pytest.mark.parametrize("scores", [(math.nan, 0.9, 0.2), (0.9, math.nan, 0.2), (0.2, 0.9, math.inf)])
def test_a_score_that_is_no_number_is_not_the_best(scores: Sequence[float], tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1, keep_best=1, best_metric="m"))
    for step, value in enumerate((*scores, 0.1), start=1):
        checkpoints.save(state(step, value), write)
    assert steps(checkpoints.folder) == [scores.index(0.9) + 1, 4]


def test_what_a_crash_left_half_written_or_half_deleted_is_removed_by_a_later_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    checkpoints.save(state(1), write)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)
        checkpoints.save(state(2), write)
    assert len(list(checkpoints.folder.iterdir())) == 2
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(3), die)
    assert len(list(checkpoints.folder.iterdir())) == 2
    last = checkpoints.save(state(4), write)
    assert list(checkpoints.folder.iterdir()) == [last]


def test_copies_backups_and_what_another_run_wrote_are_never_the_latest_and_never_removed(
    tmp_path: pathlib.Path,
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    first = checkpoints.save(state(1), write)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    claim_owner(theirs, "digest")
    Checkpoints(theirs / "checkpoints", config()).save(state(2), write)
    beside = ["step-best", "step-00000001-backup", "step-1", "backup", "zzz"]
    for name in beside:
        shutil.copytree(first, checkpoints.folder / name)
    shutil.copytree(theirs / "checkpoints/step-00000002", checkpoints.folder / "step-00000002")
    with pytest.raises(CheckpointError, match="step-00000002 belongs to another run .* resumes from step-00000001"):
        checkpoints.latest()
    last = checkpoints.save(state(3), write)
    assert checkpoints.latest() == last and not first.exists()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == sorted([*beside, "step-00000002", last.name])
    with pytest.raises(CheckpointError, match="step-00000002 was not written by this run"):
        checkpoints.save(state(2), write)


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config())
    first = checkpoints.save(state(1), write)
    shutil.copytree(first, checkpoints.folder / "step-00000009")
    with pytest.raises(CheckpointError, match="step-00000009/COMPLETE belongs to step 1"):
        checkpoints.latest()


def test_what_was_just_written_is_kept_even_where_a_later_step_is_there(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=1))
    checkpoints.save(state(9), write)
    checkpoints.save(state(3), write)
    assert steps(checkpoints.folder) == [3, 9]


def test_the_training_state_of_another_step_does_not_pass(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config())
    first, second = (checkpoints.save(state(step), stamped(step)) for step in (1, 2))
    shutil.rmtree(second / TRAINING)
    shutil.copytree(first / TRAINING, second / TRAINING)
    with pytest.raises(CheckpointError, match="step-00000002/training/rank-0 is damaged: .*Delete .*step-00000001"):
        checkpoints.latest()
    unread = Checkpoints(checkpoints.folder, config(verify=False))
    assert unread.latest() == second, "without verification lengths are all that is compared"


def stamped(step: int) -> Callable[[pathlib.Path], Callable[[], dict[str, float]]]:
    """A training state that is another one each step, of the same length."""

    def stage(folder: pathlib.Path) -> Callable[[], dict[str, float]]:
        rest = write(folder)
        (folder / "rank-0").write_bytes(b"step %03d" % step)
        return rest

    return stage


def test_every_damage_is_named_and_the_next_older_whole_checkpoint_offered(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(keep_last=3))
    for step in (1, 2, 3):
        last = checkpoints.save(state(step), write)
    (checkpoints.folder / "step-00000002" / STATE).unlink()
    for file in [path for path in last.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        for damaged in (content[:-1], content + b"x", bytes(len(content)), bytes([content[0] ^ 1]) + content[1:], b""):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.latest()
            assert str(file) in str(caught.value)
            assert f"Delete {last}, or move it out of" in str(caught.value)
            assert "resumes from step-00000001, which is whole" in str(caught.value), "the second is damaged too"
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
            checkpoints.latest()
        file.write_bytes(content)
    (last / "stray").write_bytes(b"")
    with pytest.raises(CheckpointError, match="stray does not belong to the checkpoint"):
        checkpoints.latest()
    (last / "stray").unlink()
    assert checkpoints.latest() == last


def test_a_state_of_another_version_is_a_sentence(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config())
    path = checkpoints.save(state(1), write)
    plain = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps(plain | {"moon": 1}))
    with pytest.raises(CheckpointError, match="state.json has grown"):
        checkpoints.latest()
    (path / COMPLETE).unlink()
    manifest_of = {"step": 1, "score": None}
    seal(path, claim_owner(tmp_path, "digest"), **manifest_of)
    with pytest.raises(CheckpointError, match="state.json was not written by this version of rlframe: .*'moon'"):
        checkpoints.latest()


def test_a_checkpoint_of_the_old_format_is_refused_with_what_to_do(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config())
    path = checkpoints.save(state(1), write)
    (path / COMPLETE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty, as in format 1 .* use the weights .*start_from=.*/training"):
        checkpoints.latest()
    write_sealed(path / COMPLETE, read_sealed(next(tmp_path.glob(RUN))) | {"format": 3})
    with pytest.raises(CheckpointError, match="has format 3, this version of rlframe reads format 2"):
        checkpoints.latest()


def test_a_run_keeps_its_identity_and_its_configuration(tmp_path: pathlib.Path) -> None:
    known = claim_owner(tmp_path, "digest")
    assert claim_owner(tmp_path, "digest") == known
    with pytest.raises(ConfigError, match="was written for another configuration"):
        claim_owner(tmp_path, "other")
    path = Checkpoints(tmp_path / "checkpoints", config()).save(state(1), write)
    (tmp_path / RUN).unlink()
    with pytest.raises(ConfigError, match=f"run.json is missing, which identifies the run of {path}"):
        claim_owner(tmp_path, "digest")


def test_a_disk_that_is_full_or_a_folder_that_is_gone_is_a_sentence_and_leaves_what_was_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", config())
    first = checkpoints.save(state(1), write)

    def full(folder: pathlib.Path) -> Callable[[], dict[str, float]]:
        rest = write(folder)
        (folder.parent / f".{STATE}.partial").symlink_to("/dev/full")
        return rest

    with pytest.raises(OutputError, match="state.json cannot be written: No space left on device; the disk is full"):
        checkpoints.save(state(2), full)
    assert checkpoints.latest() == first
    assert list(checkpoints.folder.iterdir()) == [first], "what was half written takes no room"
    with pytest.raises(OutputError, match="cannot be written: Not a directory; something in this path is a file"):
        (tmp_path / "file").touch()
        monkeypatch.setattr(Checkpoints, "_owner", lambda _: claim_owner(tmp_path, "digest"))
        Checkpoints(tmp_path / "file" / "checkpoints", config()).save(state(2), write)


def test_a_metric_that_was_never_measured_is_refused() -> None:
    best = config(keep_best=1, best_metric="evaluation/reward_mean")
    require_measured(config(), set())
    require_measured(best, {"evaluation/reward_mean", "train/loss"})
    with pytest.raises(RlframeError, match="got 'evaluation/reward_mean'; measured were reward/mean, train/loss. The"):
        require_measured(best, {"train/loss", "reward/mean"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": 1}, "best_metric must be given with keep_best=1"),
        ({"best_metric": "train/loss"}, "best_metric has no effect with keep_best=0"),
        ({"keep_best": -1}, "keep_best must be at least 0"),
        ({"export_every_steps": -1}, "export_every_steps must be at least 0"),
        ({"on_signal_s": -1.0}, "on_signal_s must be at least 0"),
        ({"on_signal_s": float("nan")}, "on_signal_s must be"),
        ({"export_shard_gb": 0.0}, "export_shard_gb must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)
