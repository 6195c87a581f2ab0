"""Checkpoints of a run: complete when their marker is there, and only then."""

import json
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlframe.loops.run import BestMode, CheckpointConfig
from rlframe.utils.errors import RlframeError

MARKER = "COMPLETE"
STATE = "state.json"
TRAINING, CRITIC = "training", "critic"

Stage = Callable[[pathlib.Path], Callable[[], dict[str, float]]]
"""`stage(folder)` prepares to write the training state into `folder` and returns what writes it, and then answers with
metrics: seconds and the like."""
NOTHING_BESIDE: Mapping[str, Stage] = {}


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
    num_critic_optimizer_steps: int = 0
    """The critic's position in its learning-rate schedule."""
    algorithm: dict[str, float] = field(default_factory=dict)
    """What the algorithm has adapted, such as its KL coefficient."""
    score: float | None = None
    """How good the model is, by `checkpoint.best_metric`; None when that was not measured at this step."""


class Checkpoints:
    """The folder `checkpoints/` of a run: one folder per step, written aside and completed by a marker."""

    def __init__(self, folder: pathlib.Path, config: CheckpointConfig):
        self.folder = folder
        self.config = config
        self._background: _Background | None = None
        self._metrics: dict[str, float] = {}

    def latest(self) -> pathlib.Path | None:
        """The newest complete checkpoint."""
        return max(self._complete(), key=lambda path: path.name, default=None)

    def save(self, state: RunState, stage: Stage, *, beside: Mapping[str, Stage] = NOTHING_BESIDE) -> pathlib.Path:
        """Write a checkpoint of `state`; `stage` adds the training state, `beside` that of further models to folders
        of those names. Each is staged, and written unless that is for the background, before the next is staged. Those
        checkpoints that are no longer wanted are removed.

        An asynchronous one is written on a thread once staged: `check` and `finish` raise what went wrong there. A
        crash at any point leaves the checkpoints that were complete before, and at most one incomplete folder, which
        `latest` does not see and a later save removes.
        """
        self.finish()
        path = self.folder / f"step-{state.step:08d}"
        remove(path)
        # The state changes with the run; its text does not.
        text = json.dumps(asdict(state))
        metrics: dict[str, float] = {}
        writers = []
        for name, model in {TRAINING: stage, **beside}.items():
            (path / name).mkdir(parents=True)
            started = time.monotonic()
            write = model(path / name)
            add(metrics, {"time/checkpoint_stage_s": time.monotonic() - started})
            if self.config.asynchronous:
                writers.append(write)
            else:
                add(metrics, write())
        if self.config.asynchronous:
            self._background = _Background(lambda: self._complete_with(path, text, writers, metrics))
        else:
            self._complete_with(path, text, writers, metrics)
        return path

    def check(self) -> None:
        """Raises what stopped a save in the background, if one has been stopped."""
        if self._background and not self._background.is_alive():
            self.finish()

    def finish(self) -> None:
        """Return when nothing is being written. Raises what stopped a save in the background."""
        background, self._background = self._background, None
        if background:
            background.finish()

    def abandon(self) -> None:
        """Returns when nothing is being written, complete or not; of what stopped a save nothing is said."""
        background, self._background = self._background, None
        if background:
            background.join()
        self._metrics = {}

    def metrics(self) -> dict[str, float]:
        """Seconds that the newest checkpoint took, if it was completed since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _complete_with(
        self, path: pathlib.Path, state: str, writers: list[Callable[[], dict[str, float]]], metrics: dict[str, float]
    ) -> None:
        for write in writers:
            add(metrics, write())
        (path / STATE).write_text(state, encoding="utf-8")
        for file in path.rglob("*"):
            sync(file)
        (path / MARKER).touch()
        sync(path / MARKER)
        for folder in (path, self.folder):
            sync(folder)
        self._prune()
        self._metrics = metrics

    def _prune(self) -> None:
        """Remove, oldest first, what neither `keep_last` nor `keep_best` wants, and what crashes left incomplete. The
        newest complete one is always wanted; none is being written now."""
        complete = self._complete()
        wanted = {*complete[-self.config.keep_last :], *self._best(complete)}
        for path in sorted(self.folder.glob("step-*")):
            if path not in wanted:
                remove(path)

    def _best(self, complete: list[pathlib.Path]) -> list[pathlib.Path]:
        if not self.config.keep_best:
            return []
        scores = [(read_state(path).score, path) for path in complete]
        scored = [(score, path.name, path) for score, path in scores if score is not None]
        # Of equals the newer one.
        sign = 1 if self.config.best_mode is BestMode.MAX else -1
        scored.sort(key=lambda entry: (sign * entry[0], entry[1]), reverse=True)
        return [path for *_, path in scored[: self.config.keep_best]]

    def _complete(self) -> list[pathlib.Path]:
        return sorted(marker.parent for marker in self.folder.glob(f"step-*/{MARKER}"))


class _Background(threading.Thread):
    """Work on a thread that does not keep the process alive; what stopped it is raised in the thread that asks."""

    def __init__(self, work: Callable[[], None]):
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """The work."""
        try:
            self._work()
        except BaseException as failure:  # all of it belongs to the thread that waits
            self._failure = failure

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            RlframeError: the work did not get there; says that the checkpoint is not there.
        """
        self.join()
        if isinstance(self._failure, RlframeError | OSError):
            raise RlframeError(
                f"a checkpoint could not be written in the background: {self._failure}"
            ) from self._failure
        if self._failure:
            raise self._failure


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds the numbers of `more` to those in `total`."""
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def score(config: CheckpointConfig, measured: dict[str, float], known: set[str]) -> float | None:
    """The value of `checkpoint.best_metric`, None when it was measured, but not at this step.

    Args:
        measured: metrics of this step.
        known: names of all metrics measured so far.

    Raises:
        RlframeError: there is no such metric.
    """
    name = config.best_metric
    if name is None:
        return None
    if name not in known:
        raise RlframeError(
            f"checkpoint.best_metric must be a metric that the run has measured when it saves, got {name!r}; measured "
            f"were {', '.join(sorted(known))}"
        )
    return measured.get(name)


def read_state(checkpoint: pathlib.Path) -> RunState:
    """The run state of a complete checkpoint."""
    return RunState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))


def remove(checkpoint: pathlib.Path) -> None:
    """Delete a checkpoint, complete, torn or absent."""
    # The marker goes first: a half-deleted checkpoint must not look complete.
    if (checkpoint / MARKER).exists():
        (checkpoint / MARKER).unlink()
        sync(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Make sure a file or folder is on the disk, so that the marker cannot get there before what it vouches for."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
