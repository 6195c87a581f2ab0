"""RunConfig: one run as plain dataclasses. Imports no ray and no megatron."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from rlframe.algorithms.requirements import RunFacts
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.profiling.config import ProfileConfig
from rlframe.data.config import DataConfig
from rlframe.environments.config import EnvironmentConfig
from rlframe.loops.alerts.config import AlertsConfig
from rlframe.loops.config import CheckpointConfig, EvaluationConfig, GenerationConfig, LoggingConfig, LoopConfig
from rlframe.loops.self_test.config import SelfTestConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import CriticConfig, TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rewards.config import JUDGE_PART, RewardConfig
from rlframe.rollout.base.config import CacheFormat, RolloutConfig
from rlframe.run.judge import JudgeModelConfig
from rlframe.run.teacher import TeacherConfig
from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.weight_sync.config import LoraSync, WeightSyncConfig


class Mode(StrEnum):
    """Things to do with a configuration."""

    TRAIN = "train"
    """Trains the model."""
    EVALUATE = "evaluate"
    """Evaluates model.path as training would, and does not train. Settings of training are not used."""
    GENERATE = "generate"
    """Writes responses of model.path to the prompts of data.path. Settings of training are not used."""
    SELF_TEST = "self_test"
    """Runs a few steps at learning rate 0, which must change nothing, and checks that they do not."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The configuration of a run, as `python -m rlframe.main --config-name NAME key=value ...` composes it."""

    name: str
    """Name of the run. The default is that of its config file."""
    output: Annotated[str, PathText()]
    """Folder of all files of the run. The same folder and configuration resume the run. The files of the other modes
    are in its folders `evaluate`, `generate` and `self_test`."""
    mode: Mode = Mode.TRAIN
    """Thing to do with the configuration."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the data order, of sampling and of initialisation."""
    steps: Annotated[int, Range(0, 10**9, note="0 evaluates and exports only")] = 100
    """Number of steps of the loop: rollout batches online, optimizer steps offline. 0 evaluates and exports only."""
    prompts_per_step: Annotated[int, Range(1, 1 << 24)] = 32
    """Number P of prompts (online) or sequences (offline) per step."""
    algorithm: Any
    """Settings of the algorithm: a dataclass of `rlframe.algorithms`, chosen by `algorithm.name`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The environment that answers the policy."""
    rendering: RenderingConfig = field(default_factory=RenderingConfig)
    """Settings of how messages become tokens, and tokens messages, in attempts of several turns."""
    train: TrainConfig = field(default_factory=TrainConfig)
    teacher: TeacherConfig | None = None
    """The frozen teacher, for algorithms that distil."""
    judge: JudgeModelConfig | None = None
    """A language model in engines of the run that judges attempts. null means none."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic, for algorithms that have one."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Settings of asynchronous training."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Settings of mode=generate."""
    self_test: SelfTestConfig = field(default_factory=SelfTestConfig)
    """Settings of mode=self_test."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    """Settings of what a run says when something is wrong with it."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Settings of profiles of single steps."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.output.startswith("~/"):
            self.output = str(Path(self.output).expanduser())
        if self.reward.model:
            # Rewards know nothing of layouts.
            try:
                Parallel.parse(self.reward.model.parallel)
            except ValueError as error:
                raise SettingError("reward.model.parallel", "is wrong", why=f"{error}") from error

    @property
    def folder(self) -> Path:
        """The folder of the files of this mode, absolute."""
        output = Path(self.output).absolute()
        return output if self.mode is Mode.TRAIN else output / self.mode.value

    def trains(self, *, online: bool) -> bool:
        """Returns whether ranks hold the policy. They also evaluate it, if that needs no engines.

        Args:
            online: whether the algorithm trains on what engines sample.
        """
        return self.mode in (Mode.TRAIN, Mode.SELF_TEST) or (self.mode is Mode.EVALUATE and not online)

    def sends_merged(self, *, online: bool) -> bool:
        """Returns whether engines receive the policy's weights, adapters merged.

        Args:
            online: see `trains`.
        """
        return online and self.rollout.replay is None and self.weight_sync.lora is LoraSync.MERGED

    @property
    def facts(self) -> RunFacts:
        """The facts of the run that the algorithm's settings can contradict."""
        return RunFacts(
            updates_per_batch=self.train.num_minibatches * self.train.epochs_per_batch,
            reward_names=tuple(self.reward_names),
            max_policy_lag=self.loop.max_policy_lag,
            engine_rounds=self._engine_rounds,
        )

    @property
    def _engine_rounds(self) -> str:
        """The setting by which engines compute in fewer bits than the trainer. Empty if there is none."""
        if self.rollout.engine_format is not EngineFormat.NONE:
            return f"rollout.quantization={self.rollout.engine_format}"
        if self.rollout.cache_format is not CacheFormat.AUTO:
            return f"rollout.kv_cache_dtype={self.rollout.cache_format}"
        return ""

    @property
    def reward_names(self) -> list[str]:
        """Names that `Rollout.reward_parts` will have."""
        return [*self.reward.names, *([JUDGE_PART] if self.judge else [])]

    @property
    def critic_model(self) -> ModelConfig:
        """The model of the critic's initial weights."""
        return self.critic.model or self.model

    @property
    def critic_train(self) -> TrainConfig:
        """Settings of the critic's ranks."""
        return self.critic.train or self.train
