"""Settings of the loop between steps: checkpoints, evaluations, logs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from rlframe.types.rollout import SamplingParams
from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError

HELD_OUT = "held_out"
"""Name in results of the held-out prompts of `data`, whose metrics have no name."""
SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


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
    (cluster.colocate=false), unless rollout.oversample carries groups over."""
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


class Asynchronous(StrEnum):
    """Choices of when the files of a checkpoint are written."""

    AUTO = "auto"
    """While training goes on, if every host has memory for a copy of its part of the state."""
    TRUE = "true"
    """While training goes on."""
    FALSE = "false"
    """While training waits."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Settings of checkpoints and exports."""

    start_from: Annotated[str | None, PathText()] = None
    """Megatron distributed checkpoint whose weights replace those of model.path at the start: written by
    rlframe.tools.convert, or the folder `training` of another run's checkpoint without adapters. Moments start at
    zero. Adapters lie beside these weights, new or those of train.lora.path. A critic's weights still come from its
    Hugging Face model."""

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
    asynchronous: Asynchronous = Asynchronous.AUTO
    """Whether to copy the training state to host memory and train on while it is written. It takes 12 to 18 bytes a
    parameter, shared by the ranks. auto does so where every host has that memory, as measured before each
    checkpoint, and checkpoints are written before the end (every_steps)."""
    verify: bool = True
    """Whether to compare checksums: of `read_back` of every file after it is written, and of all of it before a run
    resumes. Names, lengths and the manifest are always compared."""
    read_back: Annotated[float, Range(0, 1, note="0: nothing")] = 0.0625
    """Fraction of every file that is read back from the disk after it is written, evenly spread, with its beginning and
    its end. 1 reads back all of it, which takes a disk about as long as to write it."""
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

    @property
    def copies(self) -> Asynchronous:
        """Returns `asynchronous`, but false for auto if the last step alone is saved: no training goes on beside it."""
        last_only = self.asynchronous is Asynchronous.AUTO and not self.every_steps
        return Asynchronous.FALSE if last_only else self.asynchronous

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
class ResponsesConfig:
    """Settings of sampling responses that nothing is trained on. Stop strings are those of rollout.stop."""

    samples_per_prompt: Annotated[int, Range(1, 65536)] = 1
    """Number n of responses to each prompt."""
    temperature: Annotated[float, Range(0, 100, note="0: greedy")] = 0.0
    """Divisor of the logits. 0 takes the most likely token each time."""
    top_p: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Probability of the smallest set of most likely tokens that sampling is restricted to. 1 keeps all tokens."""
    top_k: Annotated[int, Range(0, 1 << 24, note="0: all")] = 0
    """Number of most likely tokens that sampling is restricted to. 0 keeps all tokens."""
    max_tokens: Annotated[int, Range(1, 1 << 24)] | None = None
    """Greatest number of tokens of a response. null means rollout.max_tokens, for one of evaluation.sets
    evaluation.max_tokens before that."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.temperature > 0:
            return
        for name, value, default in (
            ("samples_per_prompt", self.samples_per_prompt, 1),
            ("top_p", self.top_p, 1.0),
            ("top_k", self.top_k, 0),
        ):
            if value != default:
                raise SettingError(
                    name,
                    f"must be {default} with temperature=0",
                    got=value,
                    why="greedy responses to a prompt are all the same",
                    hint="set temperature above 0",
                )

    def sampling(self, *, max_tokens: int, stop: Sequence[str]) -> SamplingParams:
        """Returns the sampling parameters.

        Args:
            max_tokens: limit where these settings have none.
            stop: strings that end a response.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop=tuple(stop),
        )


@dataclass(kw_only=True, slots=True)
class GenerationConfig(ResponsesConfig):
    """Settings of mode=generate, which writes responses to all prompts of data.path."""

    temperature: Annotated[float, Range(0, 100, note="0: greedy")] = 1.0
    """Divisor of the logits. 0 takes the most likely token each time."""


@dataclass(kw_only=True, slots=True)
class EvaluationSetConfig(ResponsesConfig):
    """A set of prompts to evaluate."""

    path: Annotated[str | list[str], PathText()]
    """Records in the forms of data.path, or a list of these. All are evaluated, or of each with a suffix `#500` so
    many, the same ones for every seed. Of a built-in dataset these are the held-out records."""
    prompt_key: str | None = None
    """Field of the prompt. null means data.prompt_key."""
    answer_key: str | None = None
    """Field of the answer. null means data.answer_key."""
    system_prompt: str | None = None
    """System message of conversations that have none of their own. null means data.system_prompt."""
    solved_reward: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """Least reward of an attempt that counts as solved, for pass@k and maj@k. Only with samples_per_prompt above
    1."""

    majority: str | None = None
    """Name of the reward part whose extracted answers vote, for maj@k: the answer of most of the first k attempts, of
    equally many the one that was given first. It must be of exact_match, last_number, math_verify, reasoning_gym, or a
    Reward class with `extract`. null means no vote."""

    def __post_init__(self) -> None:
        ResponsesConfig.__post_init__(self)
        if self.samples_per_prompt > 1:
            return
        for name, value, default, what in (
            ("solved_reward", self.solved_reward, 1.0, "pass@k"),
            ("majority", self.majority, None, "maj@k"),
        ):
            if value != default:
                raise SettingError(
                    name,
                    f"has no effect with samples_per_prompt=1, which gives no {what}",
                    got=value,
                    hint="remove it",
                )


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Settings of evaluations. Online: greedy responses to held-out prompts, and responses to the prompts of `sets`.
    Offline: metrics of the loss on held-out items."""

    sets: dict[str, EvaluationSetConfig] = field(default_factory=dict)
    """Further sets of prompts to evaluate, by their name in metrics: evaluation/NAME/reward_mean. Online only."""

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
        for name in self.sets:
            if name == HELD_OUT or not SET_NAME.fullmatch(name):
                raise SettingError(
                    "sets",
                    f"must have names of letters, digits, dots, dashes and underscores, other than {HELD_OUT}, that of "
                    "the held-out prompts of data",
                    got=repr(name),
                )


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

    def __post_init__(self) -> None:
        check_bounds(self)
        if len(set(self.keep)) < len(self.keep):
            raise SettingError("keep", "must name each choice once", got=[str(each) for each in self.keep])
        if Keep.ALL in self.keep and len(self.keep) > 1:
            raise SettingError(
                "keep", "must be [all] alone, which has the others", got=[str(each) for each in self.keep]
            )


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """Settings of a run's logs. metrics.jsonl and samples.jsonl are always written."""

    tensorboard: bool = True
    """Whether to write TensorBoard event files to `tensorboard/`."""
    wandb_project: str | None = None
    """Weights & Biases project. null disables it. WANDB_MODE=offline writes files that `wandb sync` uploads."""
    wandb_entity: str | None = None
    """User or team of the project. null means the default of the account."""
    mlflow_experiment: str | None = None
    """MLflow experiment, at the address in MLFLOW_TRACKING_URI. null disables it."""
    trackio_project: str | None = None
    """Trackio project. null disables it."""
    group: str | None = None
    """Name that runs share which belong together, at the trackers above."""
    tags: list[str] = field(default_factory=list)
    """Words by which the trackers above find the run."""
    progress: bool = True
    """Whether to show a progress bar."""
    samples_per_step: Annotated[int, Range(0, 10**6)] = 4
    """Number of rollouts written to samples.jsonl in each step."""
    sample_table_every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 10
    """Number of steps between two tables with those rollouts at the trackers and in TensorBoard. Evaluations always
    have one. 0 writes none."""
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """The attempts that are kept token by token."""
    report: bool = True
    """Whether to write report.html, after the first step, about every minute and at the end."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.wandb_entity is not None and self.wandb_project is None:
            raise SettingError("wandb_entity", "has no effect without wandb_project", got=self.wandb_entity)
        has_tracker = self.wandb_project or self.mlflow_experiment or self.trackio_project
        for name in ("group", "tags"):
            if getattr(self, name) and not has_tracker:
                rule = "has no effect without wandb_project, mlflow_experiment or trackio_project"
                raise SettingError(name, rule, got=getattr(self, name))
