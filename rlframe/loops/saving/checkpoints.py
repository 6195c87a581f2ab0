"""Checkpoints of a run. They are complete if and only if their manifest exists.

A checkpoint is written to a folder whose name begins with a dot and holds the run's id, sealed there, and only then
renamed to `step-NNNNNNNN`. One that is no longer wanted is renamed back before it is deleted. A folder named
`step-NNNNNNNN` is therefore whole, or damaged, or from elsewhere; and half-written remains of a crash are recognised by
their name.
"""

import contextlib
import json
import logging
import math
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlframe.loops.config import BestMode, CheckpointConfig
from rlframe.loops.saving.manifest import (
    COMPLETE,
    Manifest,
    Owner,
    named_checkpoints,
    read_manifest,
    read_owner,
    require_whole,
    seal,
    step_of,
)
from rlframe.utils.errors import CheckpointError, RlframeError
from rlframe.utils.files.whole import sync, write_whole, writing

logger = logging.getLogger(__name__)
STATE = "state.json"
FORMER_CRITIC_STEPS = "num_critic_optimizer_steps"
TRAINING = "training"
"""Folder of the policy's training state; those of other models have the names of their roles."""

Stage = Callable[[pathlib.Path], Callable[[], dict[str, float]]]
"""`stage(folder)` prepares to write the training state into `folder`. It returns a function that writes it and returns
metrics, such as seconds."""
NO_MODELS: Mapping[str, Stage] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The state that a run needs to resume, besides the training state: plain JSON values."""

    step: int
    """Steps done, which is also the policy version that the engines hold after resuming."""
    num_optimizer_steps: int
    """Position in the learning-rate schedule."""
    data: dict[str, Any]
    """The cursor of the prompts."""
    results: dict[str, float]
    """Numbers for the closing paragraph, such as the accuracy before training."""
    num_auxiliary_optimizer_steps: dict[str, int] = field(default_factory=dict)
    """Positions of further models in their learning-rate schedules, by role."""
    algorithm: dict[str, float] = field(default_factory=dict)
    """Coefficients that the algorithm has adapted, such as its KL coefficient."""
    score: float | None = None
    """Value of `checkpoint.best_metric`. None if it was not measured at this step."""
    first_weights: str = ""
    """Identity of the weights with which the run began, see `first_weights.identity`. Empty if a resumed run does not
    need them, and in checkpoints from before 2026-11-30."""
    auxiliary_first_weights: dict[str, str] = field(default_factory=dict)
    """The same of further models, by role: those of which adapters are trained."""


class Checkpoints:
    """The folder `checkpoints/` of a run: one folder per step."""

    def __init__(self, folder: pathlib.Path, config: CheckpointConfig):
        """
        Args:
            folder: folder inside the run's folder, whose `run.json` identifies the owner of the checkpoints.
        """
        self.folder = folder
        self.config = config
        self._background: _Background | None = None
        self._metrics: dict[str, float] = {}

    def latest(self) -> pathlib.Path | None:
        """Returns the newest checkpoint after checking that it is whole. None if there is none.

        Raises:
            CheckpointError: the newest is damaged, or belongs to another run; the message names the file, and the next
                older checkpoint that is whole.
        """
        if not self._named():
            return None
        *older, newest = sorted(self._named(), key=step_of)
        if fault := self._fault(newest):
            whole = next((path for path in reversed(older) if not self._fault(path)), None)
            then = (
                f"resumes from {whole.name}, which is whole"
                if whole
                else ("starts again, because no older one is whole")
            )
            raise CheckpointError(f"{fault}. Delete {newest}, or move it out of {self.folder}: the run then {then}")
        return newest

    def save(
        self, state: RunState, stage: Stage, *, auxiliary: Mapping[str, Stage] = NO_MODELS, background: bool = False
    ) -> pathlib.Path:
        """Writes a checkpoint of `state`. `stage` adds the training state, `auxiliary` that of further models, in
        folders of those names. Each is staged, and written unless it is for the background, before the next is staged.
        Checkpoints that are no longer wanted are removed.

        One in the background is written in a thread after staging; `check` and `finish` raise its errors. A crash
        at any point leaves the checkpoints that were complete before, and at most one incomplete folder, which `latest`
        ignores and a later save removes.

        Returns:
            The checkpoint's folder, which exists when it is complete.

        Raises:
            OutputError: the checkpoint cannot be written.
        """
        self.finish()
        owner = self._owner()
        path = self._path(state.step)
        partial = self._aside("partial", path, owner)
        # The state changes during the run; its text does not.
        text = json.dumps(asdict(state)).encode()
        metrics: dict[str, float] = {}
        writers = []
        with discarding(partial), writing(partial):
            self.folder.mkdir(exist_ok=True)
            self._clear(owner)
            for name, model in {TRAINING: stage, **auxiliary}.items():
                (partial / name).mkdir(parents=True)
                started = time.monotonic()
                write = model(partial / name)
                add(metrics, {"time/checkpoint_stage_s": time.monotonic() - started})
                if background:
                    writers.append(write)
                else:
                    add(metrics, write())

        staged = time.monotonic()

        def complete() -> None:
            with discarding(partial), writing(partial):
                for write in writers:
                    add(metrics, write())
                write_whole(partial / STATE, text)
                for file in (partial, *partial.rglob("*")):
                    sync(file)
                seal(partial, owner, step=state.step, score=state.score, metric=self.config.best_metric)
            self._name(partial, path, owner)
            if background:
                metrics["time/checkpoint_background_s"] = time.monotonic() - staged
            self._metrics = metrics

        if background:
            self._background = _Background(complete)
        else:
            complete()
        return path

    def check(self) -> None:
        """Raises the error of a save in the background, if there is one."""
        if self._background and not self._background.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits until nothing is being written. Raises the error of a save in the background."""
        background, self._background = self._background, None
        if background:
            background.finish()

    def abandon(self) -> None:
        """Waits until nothing is being written, complete or not. Ignores the error of a save."""
        background, self._background = self._background, None
        if background:
            background.join()
        self._metrics = {}

    def metrics(self) -> dict[str, float]:
        """Returns the seconds that the newest checkpoint took, if it was completed since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _name(self, partial: pathlib.Path, path: pathlib.Path, owner: Owner) -> None:
        """Renames the whole checkpoint in `partial` to `path`, and removes those that are no longer wanted."""
        if path.exists():
            if path not in self._own(owner):
                raise CheckpointError(
                    f"{path} was not written by this run; move it out of {self.folder}. The new "
                    f"checkpoint is complete in {partial}"
                )
            self._remove(path, owner)
        with writing(path):
            partial.rename(path)
            sync(self.folder)
        self._prune(owner, new=path)

    def _prune(self, owner: Owner, *, new: pathlib.Path) -> None:
        """Removes checkpoints that neither `keep_last` nor `keep_best` keeps, but never the newest, nor the one that
        has just been written."""
        own = self._own(owner)
        paths = sorted(own, key=step_of)
        wanted = {new, *paths[-self.config.keep_last :], *self._best(own)}
        for path in paths:
            if path not in wanted:
                self._remove(path, owner)

    def _best(self, own: dict[pathlib.Path, Manifest]) -> list[pathlib.Path]:
        if not self.config.keep_best:
            return []
        metric = self.config.best_metric
        scored = [
            (manifest.score, manifest.step, path)
            for path, manifest in own.items()
            # NaN is neither above nor below another score, and neither is the value of another metric.
            if manifest.score is not None and math.isfinite(manifest.score) and manifest.metric in (None, metric)
        ]
        # Of equals the newer one.
        sign = 1 if self.config.best_mode is BestMode.MAX else -1
        scored.sort(key=lambda entry: (sign * entry[0], entry[1]), reverse=True)
        return [path for *_, path in scored[: self.config.keep_best]]

    def _own(self, owner: Owner) -> dict[pathlib.Path, Manifest]:
        """Returns the checkpoints that this run has written, as proved by their manifests. Nothing else is removed."""
        found = {}
        for path in self._named():
            try:
                manifest = read_manifest(path)
            except CheckpointError as error:
                logger.warning("not removing %s: %s", path, error)
                continue
            if (manifest.run, manifest.step) == (owner.run, step_of(path)):
                found[path] = manifest
        return found

    def _remove(self, path: pathlib.Path, owner: Owner) -> None:
        """Deletes a checkpoint of this run."""
        gone = self._aside("removed", path, owner)
        with writing(path):
            # A half-deleted folder must not look like a checkpoint.
            path.rename(gone)
            sync(self.folder)
        shutil.rmtree(gone, ignore_errors=True)

    def _clear(self, owner: Owner) -> None:
        """Deletes half-written and half-deleted folders of crashes."""
        for kind in ("partial", "removed"):
            for left in self.folder.glob(f".{kind}-{owner.run}-step-*"):
                shutil.rmtree(left, ignore_errors=True)

    def _aside(self, kind: str, path: pathlib.Path, owner: Owner) -> pathlib.Path:
        return path.with_name(f".{kind}-{owner.run}-{path.name}")

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"step-{step:08d}"

    def _named(self) -> list[pathlib.Path]:
        """Returns the folders with the name of a checkpoint. Copies and backups have other names."""
        return named_checkpoints(self.folder)

    def _fault(self, path: pathlib.Path) -> str | None:
        """Returns why `path` is not a whole checkpoint of this run, or None if it is."""
        try:
            manifest, owner = read_manifest(path), self._owner()
            if manifest.run != owner.run:
                return f"{path} belongs to another run ({manifest.run}), not to this one ({owner.run})"
            if manifest.configuration != owner.configuration:
                return f"{path} was written with another configuration than this run's"
            if manifest.step != step_of(path):
                return f"{path / COMPLETE} belongs to step {manifest.step}, so the folder was renamed"
            require_whole(path, manifest, read=self.config.verify)
            read_state(path)
        except CheckpointError as error:
            return str(error)
        return None

    def _owner(self) -> Owner:
        return read_owner(self.folder.parent)


class _Background(threading.Thread):
    """Runs work in a thread that does not keep the process alive. The thread that asks gets its error."""

    def __init__(self, work: Callable[[], None]):
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Runs the work."""
        try:
            self._work()
        except BaseException as failure:  # The waiting thread raises every kind of error.
            self._failure = failure

    def finish(self) -> None:
        """Waits for the end of the work.

        Raises:
            RlframeError: writing failed; the message names the checkpoint that is missing.
        """
        self.join()
        if isinstance(self._failure, RlframeError | OSError):
            raise RlframeError(
                f"a checkpoint could not be written in the background: {self._failure}"
            ) from self._failure
        if self._failure:
            raise self._failure


@contextlib.contextmanager
def discarding(partial: pathlib.Path) -> Iterator[None]:
    """Runs the block, which writes to the folder `partial`, and deletes the folder if the block fails, so that a full
    disk has room for the next start."""
    try:
        yield
    except RlframeError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def add(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds the numbers of `more` to those in `total`."""
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def require_measured(config: CheckpointConfig, known: set[str]) -> None:
    """Refuses a `checkpoint.best_metric` that has never been measured. A checkpoint has been saved.

    Args:
        known: names of all metrics measured so far.

    Raises:
        RlframeError: the metric has never been measured.
    """
    name = config.best_metric
    if name is not None and name not in known:
        raise RlframeError(
            f"checkpoint.best_metric must be a metric that the run has measured when it saves, got {name!r}; measured "
            f"were {', '.join(sorted(known))}. The same command with one of them goes on from the checkpoint that was "
            "saved"
        )


def read_state(checkpoint: pathlib.Path) -> RunState:
    """Returns the run state of a complete checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or has another format than this version's.
    """
    path = checkpoint / STATE
    try:
        values = json.loads(path.read_bytes())
        # Written before 2026-11-23.
        if steps := values.pop(FORMER_CRITIC_STEPS, 0):
            values["num_auxiliary_optimizer_steps"] = {"critic": steps}
        return RunState(**values)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} was not written by this version of rlframe: {error}") from error
