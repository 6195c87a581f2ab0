"""MLflow."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.loops.reporting.trackers.base import COLUMNS, RunInfo, table

logger = logging.getLogger(__name__)


class Mlflow:
    """Uploads to MLflow, at the address in MLFLOW_TRACKING_URI."""

    def __init__(self, experiment: str, info: RunInfo):
        import mlflow  # noqa: PLC0415 - optional

        self._mlflow = mlflow
        mlflow.set_experiment(experiment)
        known = info.remembered("mlflow")
        tags = {tag: "" for tag in info.tags} | ({"group": info.group} if info.group else {})
        run = mlflow.start_run(run_id=known, run_name=None if known else info.name, tags=tags or None)
        info.remember("mlflow", run.info.run_id)
        mlflow.log_dict(dict(info.config), "config.yaml")
        logger.info("mlflow: run %s (%s) at %s", info.name, run.info.run_id, mlflow.get_tracking_uri())

    def rewind(self, done_steps: int | None) -> None:
        """Does nothing: a repeated step is written twice, with equal numbers."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step. Slashes would be folders there."""
        self._mlflow.log_metrics({key.replace("/", "."): value for key, value in metrics.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a table of samples as a file of its own, because MLflow would read and write the whole of one."""
        columns = {name: [row[index] for row in table(rows)] for index, name in enumerate(COLUMNS)}
        self._mlflow.log_table(columns, f"samples/step-{step:08d}.json")

    def close(self, *, failed: bool) -> None:
        """Ends the run."""
        self._mlflow.end_run("FAILED" if failed else "FINISHED")
