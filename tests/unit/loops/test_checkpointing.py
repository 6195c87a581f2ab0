"""A checkpoint is complete or it is not there."""

import pathlib
import shutil

import pytest

from rlframe.loops import checkpointing
from rlframe.loops.checkpointing import MARKER, STATE, TRAINING, Checkpoints, RunState, read_state


def state(step: int) -> RunState:
    """The state after `step` steps, with something in every field."""
    return RunState(step=step, num_optimizer_steps=2 * step, data={"epoch": 1, "seen": [3, 4]}, results={"a": 0.1})


def write(folder: pathlib.Path) -> None:
    """Stands for the training state: a file and a folder with a file."""
    (folder / "rank-0").write_bytes(b"weights")
    (folder / "parts").mkdir()
    (folder / "parts" / "1").write_bytes(b"moments")


def die(folder: pathlib.Path) -> None:
    """A crash after half the training state."""
    (folder / "rank-0").write_bytes(b"wei")
    raise KeyboardInterrupt


def test_a_saved_checkpoint_reads_back(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    assert checkpoints.latest() is None, "not even the folder is there"
    path = checkpoints.save(state(5), write)
    assert checkpoints.latest() == path
    assert read_state(path) == state(5)
    assert (path / TRAINING / "parts" / "1").read_bytes() == b"moments"


def test_a_crash_before_the_marker_leaves_the_older_checkpoint(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
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
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    first, second = checkpoints.save(state(1), write), checkpoints.save(state(2), write)

    def tear(path: pathlib.Path, **_: object) -> None:
        (pathlib.Path(path) / STATE).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", tear)
        checkpoints.save(state(2), write)
    assert second.is_dir() and checkpoints.latest() == first


def test_older_checkpoints_are_removed_after_the_newer_is_complete(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 9, 10):
        checkpoints.save(state(step), write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(11), die)
    assert [read_state(path).step for path in checkpoints._complete()] == [9, 10]


def test_the_newest_is_the_highest_step_not_the_last_written(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=5)
    for step in (100, 20, 3):
        checkpoints.save(state(step), write)
    latest = checkpoints.latest()
    assert latest is not None and read_state(latest).step == 100


def test_a_half_deleted_checkpoint_does_not_look_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
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
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    old = checkpoints.save(state(1), write)
    events: list[pathlib.Path] = []
    real = checkpointing.sync

    def sync(path: pathlib.Path) -> None:
        assert (old / MARKER).exists(), "the older one must stay until the newer is on the disk"
        events.append(path)
        real(path)

    monkeypatch.setattr(checkpointing, "sync", sync)
    path = checkpoints.save(state(2), write)
    marker = events.index(path / MARKER)
    written = {file for file in path.rglob("*")} - {path / MARKER}
    assert written == set(events[:marker]), "files and the folders that list them"
    assert events[marker + 1 :] == [path, tmp_path], "then the folders that list the marker and the checkpoint"
