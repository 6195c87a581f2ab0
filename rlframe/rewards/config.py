"""Settings of the rewards. Imports no reward."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from rlframe.utils.bounds import PathText, Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError

MODEL_PART = "model"
"""Name of the reward model's score in metrics and in `Rollout.reward_parts`."""
JUDGE_PART = "judge_model"
"""Name of the score of a judge in engines of the run, in the same places."""
LARGEST_SCORE = 1e6
"""Greatest absolute value of a score. A greater one is a mistake and counts as a failure, because a single such number
would decide a whole step."""
FIRST_CALL_S = 30.0
"""Seconds that the first call of a part may take at least in each process: it may import packages or load a model."""
TOTAL = "reward"
MEASURED = {
    TOTAL: "the sum of all parts",
    "response_tokens": "the length of responses",
    "at_tokens": "the reward at single tokens",
}
"""Names of other metrics beside those of the parts: of two with one name only one is told."""


class Per(StrEnum):
    """The things that a reward function can be given at a time."""

    ATTEMPT = "attempt"
    """One attempt, as soon as it is over."""
    GROUP = "group"
    """All attempts at one prompt, when the last of them is over."""


@dataclass(kw_only=True, slots=True)
class RewardTerm:
    """One reward function and its weight."""

    name: Annotated[str, PathText()]
    """A file of rlframe/rewards, or a function or Reward class of one's own: `path/to/file.py:function` or
    `package.module:Class`."""
    weight: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """Factor of the part in the sum. 0 only logs it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the reward: the fields of its config class."""
    per: Per = Per.ATTEMPT
    """The thing that it is given at a time. With `group` a function gets the list of responses in the place of the
    response, and returns a list."""
    timeout_s: Seconds | None = None
    """Greatest time in seconds of one call. The first in each process may take 30 s. One that takes longer counts as a
    failure. null means reward.timeout_s; for rewards that wait for others, such as judges, it means no limit but those
    of their options."""

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingError("name", "must name a reward", got="''")
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class ScoringModelConfig:
    """A reward model: a frozen model with a head of one output, such as `algorithm=reward_model` trains.

    A rollout's score is the head's output at its last sampled token, the stop token included.
    """

    path: Annotated[str, PathText()]
    """Local folder in Hugging Face format, or a hub id. It must have the policy's tokenizer."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. null means the hub's default."""
    weight: Annotated[float, Range(-(10**6), 10**6)] = 1.0
    """Factor of the score in the sum. 0 only logs it."""
    parallel: str = "d1"
    """Layout of its ranks, such as t2."""
    colocate: bool = True
    """Whether it shares the policy's devices and takes turns with it. Otherwise it has devices of its own, after the
    policy's."""

    def __post_init__(self) -> None:
        if not self.path:
            raise SettingError("path", "must name a model", got="an empty string")
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """Settings of the rewards: the weighted sum of the parts and of the reward model's score."""

    parts: dict[str, RewardTerm] = field(default_factory=dict)
    """Reward functions, by their name in metrics and in `Rollout.reward_parts`. On the command line
    `reward.parts.mine.name=...` replaces the parts of the files, `+reward.parts.mine.name=...` adds one. In a file that
    inherits others, parts are added, and null leaves one out."""
    model: ScoringModelConfig | None = None
    """A reward model, which scores in addition to the parts or alone."""
    timeout_s: Seconds = 5.0
    """Greatest time in seconds of one part on one rollout, or on one group, unless the part has a limit of its own. A
    part that takes longer counts as 0, and the rollout as failed."""
    workers: Annotated[int, Range(1, 256)] = 2
    """Number of processes that score in parallel."""
    memory_gb: Annotated[float, Range(0.25, 100_000)] = 8.0
    """Greatest memory in GiB of one of these processes. A part that needs more counts as 0, and the rollout as
    failed."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if JUDGE_PART in self.parts:
            raise SettingError(
                "parts",
                f"must not be called {JUDGE_PART!r}, which names the score of the section judge",
                hint="rename it",
            )
        for name, what in MEASURED.items():
            if name in self.parts and not self._is_total(name):
                raise SettingError("parts", f"must not be called {name!r}, which names {what}", hint="rename it")
        if self.model and MODEL_PART in self.parts:
            raise SettingError(
                "parts", f"must not be called {MODEL_PART!r}, which names the score of reward.model", hint="rename it"
            )

    def _is_total(self, name: str) -> bool:
        """Returns whether a part is the whole reward, and called so."""
        return name == TOTAL and len(self.names) == 1 and self.parts[name].weight == 1

    @property
    def names(self) -> list[str]:
        """Names that `Rollout.reward_parts` will have."""
        return [*self.parts, *([MODEL_PART] if self.model else [])]
