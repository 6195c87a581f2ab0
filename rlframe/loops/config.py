"""Settings of what a loop does between steps: checkpoints, evaluations, logs."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError


class BestMode(StrEnum):
    """Which value of a metric is better."""

    MAX = "max"
    MIN = "min"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When a run saves itself, what it keeps, and when it exports the model."""

    start_from: Annotated[str | None, PathText()] = None
    """A Megatron distributed checkpoint to take the first weights from instead of those of model.path: what
    rlframe.tools.convert writes, or the folder `training` of another run's checkpoint. Moments begin at zero. Those of
    a critic still come from its Hugging Face model."""

    every_steps: Annotated[int, Range(0, 10**9, note="0 saves at the end only")] = 50
    """Save after every this many steps, and at the end; 0 saves at the end only."""
    keep_last: Annotated[int, Range(1, 10**6)] = 2
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""
    keep_best: Annotated[int, Range(0, 10**6)] = 0
    """Complete checkpoints kept besides, those with the best `best_metric`."""
    best_metric: str | None = None
    """Name of a metric in metrics.jsonl, such as evaluation/reward_mean. A checkpoint counts with its own step's value;
    where that step did not measure it, it is not among the best."""
    best_mode: BestMode = BestMode.MAX
    """max: the greater the better."""
    asynchronous: bool = False
    """Copy the training state to host memory and go on while it is written: 12 to 18 bytes a parameter, shared out over
    the ranks."""
    verify: bool = True
    """Compare checksums: of every file once it is written, read back from the disk, and again before a run resumes.
    Names, lengths and the manifest are compared in any case."""
    on_signal_s: Annotated[float, Range(0, 86_400, note="0: ends at once, nothing is saved")] = 300.0
    """SIGTERM or the first Ctrl-C lets a step take this many seconds more, saves, and ends the run with code 143 or
    130. A step that takes longer is not saved, none is at 0. The second signal ends the run at once."""
    export: bool = True
    """Write the trained model in Hugging Face format to `model/` at the end."""
    export_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 0
    """Also write it to `exports/step-NNNNNNNN/` after every this many steps, and adapters beside it to
    `exports/step-NNNNNNNN-adapter/`; 0 never. All are kept."""
    export_dtype: str = "bfloat16"
    """bfloat16 or float32."""
    export_shard_gb: Annotated[float, Range(above=0, maximum=10**6)] = 5.0
    """Greatest size of an exported file in GB (1e9 bytes); a larger model becomes several with an index."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.keep_best and self.best_metric is None:
            raise SettingError(
                "best_metric",
                f"must be given with keep_best={self.keep_best}, such as evaluation/reward_mean",
                got="none",
            )
        if self.best_metric is not None and not self.keep_best:
            raise SettingError(
                "best_metric",
                "must be left out unless keep_best is at least 1: it would have no effect",
                got=repr(self.best_metric),
            )
        if self.export_dtype not in ("bfloat16", "float32"):
            raise SettingError("export_dtype", "must be bfloat16 or float32", got=repr(self.export_dtype))


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Online: greedy answers to held-out prompts. Offline: what the loss says of held-out items."""

    every_steps: Annotated[int, Range(0, 10**9, note="0: only before and after")] = 0
    """Evaluate after every this many steps; 0 means only before the first and after the last."""
    max_tokens: Annotated[int, Range(1, 1 << 24)] | None = None
    """Response tokens at most, online; the rollout's own limit when null."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """What a run leaves for people to read. metrics.jsonl and samples.jsonl are always written."""

    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard/`."""
    wandb_project: str | None = None
    """Weights & Biases project; null is off."""
    mlflow_experiment: str | None = None
    """MLflow experiment; null is off."""
    progress: bool = True
    """Show a progress bar."""
    samples_per_step: Annotated[int, Range(0, 10**6)] = 4
    """Rollouts written to samples.jsonl each step."""

    def __post_init__(self) -> None:
        check_bounds(self)
