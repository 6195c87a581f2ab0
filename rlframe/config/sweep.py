"""Sweeps: checks all jobs of a run with `-m` before the first one begins, and prints the results of all as a table at
the end."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins import basic_launcher
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from rlframe.utils.errors import RlframeError, SweepError
from rlframe.utils.process.age import program_began
from rlframe.utils.secrets import without_secret

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """One combination of overrides and its results."""

    overrides: list[str]
    """The user's overrides, each in full: `key=value`."""
    started: float
    """Its beginning, of `time.monotonic`. A run of its own began with the program."""
    output: str = ""
    """The run's folder. Empty if the job was refused."""
    results: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation, or the last loss, by name."""
    seconds: float = 0.0
    code: int = 0
    """Exit code that the job would have had on its own."""

    @classmethod
    def begin(cls) -> "Job":
        """Returns the job that Hydra has just started."""
        hydra = HydraConfig.get()
        # Before the first job of a sweep all jobs are checked, which takes none of its own time.
        started = time.monotonic() if hydra.mode is RunMode.MULTIRUN else program_began()
        job = cls(overrides=as_written(hydra.overrides.task), started=started)
        if hydra.mode is RunMode.MULTIRUN:
            logger.info("run %s of the sweep: %s", hydra.job.num, " ".join(job.overrides))
        return job

    def end(self, results: dict[str, float], *, code: int = 0) -> None:
        """Records the results of a loop."""
        self.seconds, self.code = time.monotonic() - self.started, code
        last = {
            key.removeprefix("after/").removesuffix("_mean"): results[key]
            for key in results
            if key.startswith("after/")
        }
        self.results = last or ({"loss": results["last_loss"]} if "last_loss" in results else {})


class Table(Callback):
    """Hydra's callback, named in configs/base.yaml. Prints the table of a sweep, and sets the exit code of the
    program."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Records a job in the process that began the sweep. Hydra calls it after each job, and writes the overrides of
        one that ends with an internal error."""
        job_return.overrides = as_written(job_return.overrides or [])
        if job_return.status is JobStatus.COMPLETED and isinstance(job := job_return.return_value, Job):
            self.jobs.append(job)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the table. Hydra calls it when all jobs are done."""
        sys.stdout.write(table(self.jobs) + "\n")
        if code := max((job.code for job in self.jobs), default=0):
            sys.exit(code)


@contextmanager
def checked_first(check: Callable[[DictConfig], RlframeError | None]) -> Iterator[None]:
    """Has all jobs that Hydra starts here, one after the other, checked before the first one begins: those of a sweep,
    or of each batch where its sweeper makes several, as one does that chooses by results.

    Other launchers, which start all jobs at once and maybe on other machines, leave the check to the jobs.

    Args:
        check: returns why a job would be refused. It is called as a job is.

    Raises:
        SweepError: a job is refused. None of its batch has begun; the table of earlier batches is printed.
        SystemExit, KeyboardInterrupt: a signal has ended a job, or came between two. The table of those before it is
            printed.
    """
    # Hydra 1.3 executes the module of its launcher once more when it looks for plugins.
    Plugins.instance()
    ours = basic_launcher.BasicLauncher
    launch = ours.launch
    ended: list[Job] = []

    # Hydra has no callback for a batch, which every sweeper gives to its launcher.
    def launch_checked(
        self: basic_launcher.BasicLauncher, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        checking, context = copy(self), self.hydra_context
        assert context and self.config and self.task_function
        # Hydra's sweeper has just written it, with secrets, and nothing reads it.
        (Path(self.config.hydra.sweep.dir) / "multirun.yaml").unlink(missing_ok=True)
        checking.task_function, checking.hydra_context = check, HydraContext(context.config_loader, Callbacks())
        looks = launch(checking, job_overrides, initial_job_idx)
        if any(look.return_value for look in looks):
            if ended:
                sys.stdout.write(table(ended) + "\n")
            raise SweepError(refusals(looks, first=initial_job_idx))
        noting = copy(self)
        noting.task_function = partial(noted, self.task_function)
        try:
            return launch(noting, job_overrides, initial_job_idx)
        except (SystemExit, KeyboardInterrupt):
            # A signal has ended a job, or came between two, and ends the sweep.
            if ended:
                sys.stdout.write(table(ended) + "\n")
            raise

    def noted(task: Callable[[DictConfig], object], composed: DictConfig) -> object:
        if isinstance(job := task(composed), Job):
            ended.append(job)
        return job

    ours.launch = launch_checked
    # Hydra's log would say that it starts what is checked, and has secrets.
    basic_launcher.log.disabled = True
    try:
        yield
    finally:
        basic_launcher.log.disabled = False
        ours.launch = launch


def refusals(looks: Sequence[JobReturn], *, first: int) -> str:
    """Returns a text with the jobs that are refused, together where the reason is the same.

    Args:
        looks: what the check of each job of a batch has returned.
        first: number of the first one.
    """
    runs = [as_written(look.overrides or []) for look in looks]
    shared = shared_by(runs)
    names: dict[str, list[str]] = {}
    for number, (look, run) in enumerate(zip(looks, runs, strict=True), first):
        if look.return_value:
            own = " ".join(one for one in run if one not in shared)
            names.setdefault(str(look.return_value), []).append(f"run {number}: {own}")
    count = sum(map(len, names.values()))
    lines = [f"{count} of {len(runs)} runs {'is' if count == 1 else 'are'} refused, so that none of them begins"]
    lines += [line for reason, refused in names.items() for line in (*refused, reason)]
    return "\n".join(lines + _all_with(shared))


def as_written(overrides: Sequence[str]) -> list[str]:
    """Returns overrides in Hydra's grammar as users write them, without secrets."""
    return [without_secret(override.lstrip("+")) for override in overrides]


def shared_by(runs: Sequence[Sequence[str]]) -> list[str]:
    """Returns the overrides that all runs have. Of a single run everything is its own."""
    return [one for one in runs[0] if all(one in run for run in runs)] if runs[1:] else []


def table(jobs: list[Job]) -> str:
    """Returns one line for each job: the overrides that not all jobs share, final held-out means or loss, seconds and
    folder. Below them are the overrides that all jobs share."""
    names = list(dict.fromkeys(name for job in jobs for name in job.results))
    shared = shared_by([job.overrides for job in jobs])
    rows = [["overrides", *names, "seconds", "output"]]
    for job in jobs:
        own = " ".join(one for one in job.overrides if one not in shared)
        values = [f"{job.results[name]:.4g}" if name in job.results else "-" for name in names]
        where = job.output or "refused"
        rows.append([own, *values, f"{job.seconds:.1f}", f"{where} (failed)" if job.code == 1 else where])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + _all_with(shared))


def _all_with(shared: list[str]) -> list[str]:
    return ["all with " + " ".join(shared)] if shared else []
