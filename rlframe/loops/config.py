"""Settings of the loop between steps: checkpoints, evaluations, logs."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError


class BestMode(StrEnum):
    """Direction in which a metric is better."""

    MAX = "max"
    MIN = "min"


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """Settings of asynchronous training."""

    max_policy_lag: Annotated[int, Range(0, 1000)] = 0
    """Greatest number of versions by which a token may be older than the policy that trains on it. 0 samples and trains
    in turns. Above 0 engines sample for later steps while the policy trains; they need devices of their own
    (cluster.colocate=false)."""
    pipeline_depth: Annotated[int, Range(1, 1000)] = 1
    """Number of further steps that are sampled ahead, at most max_policy_lag. A deeper pipeline idles less and trains
    on older tokens."""
    in_flight_updates: bool = True
    """Whether responses under way go on with new weights as soon as they arrive. Otherwise they are finished first,
    with the old weights, while the policy waits."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if 0 < self.max_policy_lag < self.pipeline_depth:
            raise SettingError(
                "pipeline_depth",
                f"must be at most max_policy_lag={self.max_policy_lag}",
                got=self.pipeline_depth,
                why="what is sampled further ahead would be too old when it is trained on",
            )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Settings of checkpoints and exports."""

    start_from: Annotated[str | None, PathText()] = None
    """Megatron distributed checkpoint whose weights replace those of model.path at the start: written by
    rlframe.tools.convert, or the folder `training` of another run's checkpoint. Moments start at zero. A critic's
    weights still come from its Hugging Face model."""

    every_steps: Annotated[int, Range(0, 10**9, note="0 saves at the end only")] = 50
    """Number of steps between two checkpoints. 0 saves at the end only."""
    keep_last: Annotated[int, Range(1, 10**6)] = 2
    """Number of complete checkpoints that are kept. Older ones are removed after a newer one is complete."""
    keep_best: Annotated[int, Range(0, 10**6)] = 0
    """Number of further complete checkpoints that are kept: those with the best `best_metric`."""
    best_metric: str | None = None
    """Name of a metric in metrics.jsonl, such as evaluation/reward_mean. A checkpoint counts with its own step's value;
    without one it is not among the best."""
    best_mode: BestMode = BestMode.MAX
    """Whether greater (max) or smaller (min) values are better."""
    asynchronous: bool = False
    """Whether to copy the training state to host memory and train on while it is written. It takes 12 to 18 bytes a
    parameter, shared by the ranks."""
    verify: bool = True
    """Whether to compare checksums of every file: after it is written, by reading it back from the disk, and before a
    run resumes. Names, lengths and the manifest are always compared."""
    on_signal_s: Annotated[float, Range(0, 86_400, note="0: ends at once, nothing is saved")] = 300.0
    """Seconds that a step may still take after SIGTERM or the first Ctrl-C. The run then saves, and ends with code 143
    or 130. A step that takes longer is not saved; 0 saves none. The second signal ends the run at once."""
    export: bool = True
    """Whether to write the trained model in Hugging Face format to `model/` at the end."""
    export_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 0
    """Number of steps between two further exports to `exports/step-NNNNNNNN/`, with adapters in
    `exports/step-NNNNNNNN-adapter/`. 0 disables them. All are kept."""
    export_dtype: str = "bfloat16"
    """Number format of exports: bfloat16 or float32."""
    export_shard_gb: Annotated[float, Range(above=0, maximum=10**6)] = 5.0
    """Greatest size of an exported file in GB (1e9 bytes). A larger model is written as several files with an index."""

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
                "has no effect with keep_best=0; remove it",
                got=repr(self.best_metric),
            )
        if self.export_dtype not in ("bfloat16", "float32"):
            raise SettingError("export_dtype", "must be bfloat16 or float32", got=repr(self.export_dtype))


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Settings of evaluations. Online: greedy responses to held-out prompts. Offline: metrics of the loss on held-out
    items."""

    every_steps: Annotated[int, Range(0, 10**9, note="0: only before and after")] = 0
    """Number of steps between two evaluations. 0 evaluates only before the first and after the last step."""
    max_tokens: Annotated[int, Range(1, 1 << 24)] | None = None
    """Greatest number of tokens of a response, online. null means the rollout's limit."""
    num_engines: Annotated[int, Range(0, 4096, note="0: engines are shared")] = 0
    """Number of the rollout.num_engines engines that evaluate and do nothing else, where engines sample while the
    policy trains. They receive the weights of a step when its evaluation begins and keep them until it is done, so that
    no weight sync waits for it. 0 shares the engines, under evaluation.share."""
    share: Annotated[float, Range(above=0, maximum=1)] = 0.25
    """Greatest fraction of the attempts under way that are of an evaluation, where engines sample while the policy
    trains (loop.max_policy_lag above 0 and cluster.colocate=false). Training goes on meanwhile. The next weight sync
    waits for the rest of the evaluation, which then has no limit, so that its step's weights sample all of it."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Keep(StrEnum):
    """Choices of attempts that are kept token by token."""

    FIRST = "first"
    """The first ones of the batch."""
    RANDOM = "random"
    """Any, the same ones in a run that is done again."""
    BEST = "best"
    """The ones with the highest reward, among equals the ones with the greatest advantage."""
    WORST = "worst"
    """The ones with the lowest reward, among equals the ones with the smallest advantage."""
    ALL = "all"
    """All of them."""


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """Settings of the attempts that are kept token by token in `samples/`, for report.html and
    rlframe.tools.rollouts."""

    keep: list[Keep] = field(default_factory=lambda: [Keep.BEST, Keep.WORST, Keep.RANDOM])
    """Choices of attempts of each step: first, random, best, worst, or all. [] keeps none."""
    of_each: Annotated[int, Range(1, 10**6)] = 2
    """Number of attempts of each choice and step. `all` keeps all."""
    trainer_logprobs: bool = False
    """Whether the trainer scores the kept attempts before it trains on them, where the step does not need such
    logprobs anyway. They show where trainer and engine disagree, and cost one forward pass of the kept attempts."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if len(set(self.keep)) < len(self.keep):
            raise SettingError("keep", "must name each choice once", got=[str(each) for each in self.keep])
        if Keep.ALL in self.keep and len(self.keep) > 1:
            raise SettingError(
                "keep", "must be [all] alone, which has the others", got=[str(each) for each in self.keep]
            )
        if self.trainer_logprobs and not self.keep:
            raise SettingError("trainer_logprobs", "has no effect with keep=[]; remove it", got="true")


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Settings of a run's logs. metrics.jsonl and samples.jsonl are always written."""

    tensorboard: bool = True
    """Whether to write TensorBoard event files to `tensorboard/`."""
    wandb_project: str | None = None
    """Weights & Biases project. null disables it."""
    mlflow_experiment: str | None = None
    """MLflow experiment. null disables it."""
    progress: bool = True
    """Whether to show a progress bar."""
    samples_per_step: Annotated[int, Range(0, 10**6)] = 4
    """Number of rollouts written to samples.jsonl in each step."""
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """The attempts that are kept token by token."""
    report: bool = True
    """Whether to write report.html, after the first step, about every minute and at the end. Needs the extra
    `report`."""

    def __post_init__(self) -> None:
        check_bounds(self)
