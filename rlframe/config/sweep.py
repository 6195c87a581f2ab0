"""Sweeps: collects the results of each job of a run with `-m`, and prints them as a table at the end."""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from rlframe.utils.process.age import program_began


@dataclass(kw_only=True)
class Job:
    """One combination of overrides and its results."""

    overrides: list[str]
    """The user's overrides, each in full: `key=value`."""
    started: float
    """Its beginning, of `time.monotonic`. The first one began with the program."""
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
        overrides = [override.lstrip("+") for override in hydra.overrides.task]
        is_first = hydra.mode is not RunMode.MULTIRUN or hydra.job.num == 0
        return cls(overrides=overrides, started=program_began() if is_first else time.monotonic())

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
        """Records a job in the process that began the sweep. Hydra calls it after each job."""
        if isinstance(job := job_return.return_value, Job):
            self.jobs.append(job)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the table. Hydra calls it when all jobs are done."""
        sys.stdout.write(table(self.jobs) + "\n")
        if code := max((job.code for job in self.jobs), default=0):
            sys.exit(code)


def table(jobs: list[Job]) -> str:
    """Returns one line for each job: the overrides that not all jobs share, final held-out means or loss, seconds and
    folder. Below them are the overrides that all jobs share."""
    names = list(dict.fromkeys(name for job in jobs for name in job.results))
    shared = [one for one in jobs[0].overrides if all(one in job.overrides for job in jobs)] if jobs[1:] else []
    rows = [["overrides", *names, "seconds", "output"]]
    for job in jobs:
        own = " ".join(one for one in job.overrides if one not in shared)
        values = [f"{job.results[name]:.4g}" if name in job.results else "-" for name in names]
        where = job.output or "refused"
        rows.append([own, *values, f"{job.seconds:.1f}", f"{where} (failed)" if job.code == 1 else where])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + (["all with " + " ".join(shared)] if shared else []))
