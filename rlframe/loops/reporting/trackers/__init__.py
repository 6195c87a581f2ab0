"""Places beside the run's folder that get its numbers: TensorBoard, Weights & Biases, MLflow, Trackio."""

import pathlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rlframe.loops.config import LoggingConfig
from rlframe.loops.reporting.trackers.base import RunInfo, Tracker
from rlframe.loops.reporting.trackers.mlflow_tracker import Mlflow
from rlframe.loops.reporting.trackers.tensorboard import TensorBoard
from rlframe.loops.reporting.trackers.trackio_tracker import Trackio
from rlframe.loops.reporting.trackers.wandb_tracker import Wandb
from rlframe.loops.reporting.uploads import Uploads


def trackers(
    config: LoggingConfig, folder: pathlib.Path, name: str, resolved: Mapping[str, Any], done_steps: int | None
) -> Iterator[Tracker]:
    """Yields the trackers that the settings ask for, begun. Those that use a network have a thread each.

    Args:
        folder: of the run, which remembers the run's names at the trackers.
        resolved: the run's configuration as plain values.
        done_steps: steps that a resumed run keeps. None for a new one.

    Raises:
        ConfigError: a tracker could not begin.
    """
    info = RunInfo(folder=folder, name=name, config=resolved, group=config.group, tags=tuple(config.tags))
    if config.tensorboard:
        yield TensorBoard(folder / "tensorboard", done_steps)
    makes: dict[str, Callable[[], Tracker]] = {}
    if config.wandb_project:
        makes["wandb_project"] = partial(Wandb, config.wandb_project, config.wandb_entity, info)
    if config.mlflow_experiment:
        makes["mlflow_experiment"] = partial(Mlflow, config.mlflow_experiment, info)
    if config.trackio_project:
        makes["trackio_project"] = partial(Trackio, config.trackio_project, info)
    for setting, make in makes.items():
        yield Uploads(setting.partition("_")[0], make, setting=f"logging.{setting}")
