"""Checkpoints of a run: complete when their marker is there, and only then."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MARKER = "COMPLETE"
STATE = "state.json"
TRAINING = "training"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything a run must know to go on, besides the training state: plain JSON values."""

    step: int
    """Steps done; also the policy version that the engines hold after resume."""
    num_optimizer_steps: int
    """Position in the learning-rate schedule."""
    data: dict[str, Any]
    """The cursor of the prompts."""
    results: dict[str, float]
    """What the closing paragraph will need, such as the accuracy before training."""


class Checkpoints:
    """The folder `checkpoints/` of a run: one folder per step, written aside and completed by a marker."""

    def __init__(self, folder: pathlib.Path, *, keep_last: int):
        self.folder = folder
        self.keep_last = keep_last

    def latest(self) -> pathlib.Path | None:
        """The newest complete checkpoint."""
        return max(self._complete(), key=lambda path: path.name, default=None)

    def save(self, state: RunState, write_training: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """Write a checkpoint of `state`; `write_training(folder)` adds the training state. Older ones are removed.

        A crash at any point leaves the checkpoints that were complete before, and at most one incomplete folder, which
        `latest` does not see and the next save of that step writes anew.
        """
        path = self.folder / f"step-{state.step:08d}"
        remove(path)
        training = path / TRAINING
        training.mkdir(parents=True)
        write_training(training)
        (path / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        for file in path.rglob("*"):
            sync(file)
        (path / MARKER).touch()
        sync(path / MARKER)
        for folder in (path, self.folder):
            sync(folder)
        for old in self._complete()[: -self.keep_last]:
            remove(old)
        return path

    def _complete(self) -> list[pathlib.Path]:
        return sorted(marker.parent for marker in self.folder.glob(f"step-*/{MARKER}"))


def read_state(checkpoint: pathlib.Path) -> RunState:
    """The run state of a complete checkpoint."""
    return RunState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))


def remove(checkpoint: pathlib.Path) -> None:
    """Delete a checkpoint, complete, torn or absent."""
    # The marker goes first: a half-deleted checkpoint must not look complete.
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Make sure a file or folder is on the disk, so that the marker cannot get there before what it vouches for."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
