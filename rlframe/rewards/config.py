"""Settings of the rewards. Light: imports no reward."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlframe.utils.bounds import PathText, Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError

MODEL_PART = "model"
"""Name of the reward model's score in metrics and in `Rollout.reward_parts`."""
LARGEST_SCORE = 1e6
"""A score beyond it in size is a failure: it is a mistake, and one such number decides a whole step."""


@dataclass(kw_only=True, slots=True)
class RewardTerm:
    """One reward function and what it counts."""

    name: Annotated[str, PathText()]
    """A file of rlframe/rewards, or a function or a Reward of yours: `path/to/file.py:function` or
    `package.module:Class`."""
    weight: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """The part is multiplied by it in the sum; 0 only logs it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the reward itself: the fields of its config class."""

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingError("name", "must name a reward", got="''")
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class ScoringModelConfig:
    """A reward model: a frozen model with a head of one output, such as `algorithm=reward_model` trains.

    A rollout's score is what the head says at its last sampled token, the stop token where there is one.
    """

    path: Annotated[str, PathText()]
    """A local folder in Hugging Face format or a hub id, with the policy's tokenizer."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; the hub's default when null."""
    weight: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """The score is multiplied by it in the sum; 0 only logs it."""
    parallel: str = "d1"
    """Layout of its ranks, such as t2."""
    colocate: bool = True
    """true: on the policy's devices, taking turns with it. false: on devices of its own, which follow the policy's."""

    def __post_init__(self) -> None:
        if not self.path:
            raise SettingError("path", "must name a model", got="an empty string")
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """How rollouts are judged: the weighted sum of the parts and of the model's score."""

    parts: dict[str, RewardTerm] = field(default_factory=dict)
    """Reward functions, by the name they have in metrics and in `Rollout.reward_parts`."""
    model: ScoringModelConfig | None = None
    """A reward model, which scores beside them or alone."""
    timeout_s: Seconds = 5.0
    """Limit for one part on one rollout. A part that takes longer counts as 0, and the rollout as failed."""
    workers: Annotated[int, Range(1, 256)] = 2
    """Processes that judge in parallel."""
    memory_gb: Annotated[float, Range(0.25, 100_000)] = 8.0
    """Limit of the memory that one of these processes may take, in GiB. A part that wants more counts as 0, and the
    rollout as failed."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.model and MODEL_PART in self.parts:
            raise SettingError(
                "parts", f"must not be called {MODEL_PART!r}, which names the score of reward.model", hint="rename it"
            )

    @property
    def names(self) -> list[str]:
        """What `Rollout.reward_parts` will have."""
        return [*self.parts, *([MODEL_PART] if self.model else [])]
