"""Settings of a judge in engines of the run. Imports no ray and no megatron."""

from dataclasses import dataclass, field
from typing import Annotated

from rlframe.models.config import ModelConfig
from rlframe.rewards.judge.question import QuestionConfig
from rlframe.rollout.base.config import RolloutConfig
from rlframe.utils.bounds import PathText, Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class JudgeModelConfig(QuestionConfig):
    """A language model that judges attempts in engines of its own, on devices of their own: a reward beside
    reward.parts, called judge_model in metrics. It is asked when groups are complete, and answers greedily."""

    path: Annotated[str, PathText()]
    """Name of an embedded model, a local folder in Hugging Face format, or a hub id. It must have a chat template."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. null means the hub's default."""
    weight: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """Factor of the score in the sum. 0 only logs it."""
    engine: RolloutConfig = field(default_factory=RolloutConfig)
    """Engines that hold it: a section like rollout. Its max_tokens is the greatest number of tokens of a reply."""

    def __post_init__(self) -> None:
        QuestionConfig.__post_init__(self)
        if not self.path:
            raise SettingError("path", "must name a model", got="an empty string")

    @property
    def model(self) -> ModelConfig:
        """The model in the form of `ModelConfig`."""
        return ModelConfig(path=self.path, revision=self.revision)
