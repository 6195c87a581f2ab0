"""Settings of the environment. Imports no environment."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from rlframe.utils.bounds import PathText, Range, Seconds, check_bounds
from rlframe.utils.errors import SettingError


class Verdict(StrEnum):
    """Verdicts on an attempt that is over."""

    TRAIN = "train"
    """It is judged as it is, and trained on."""
    MASK = "mask"
    """It is not trained on, and does not count in its group's baseline."""
    RETRY = "retry"
    """It begins again, at most `environment.max_retries` times, and is masked then."""


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Settings of the environment that answers the policy, and of the processes in which its sessions run."""

    name: Annotated[str, PathText()] = "single_turn"
    """The environment: a file of `rlframe/environments`, `path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment: the fields of its config class."""
    max_turns: Annotated[int, Range(1, 100_000)] = 16
    """Greatest number of responses of an attempt. An attempt that would need more is over."""
    max_tokens: Annotated[int, Range(1, 1 << 30)] | None = None
    """Greatest number of tokens of an attempt, with prompt, responses and answers. null means what the engine and
    the trainer can take. An attempt whose next response might not fit is over."""
    on_limit: Verdict = Verdict.TRAIN
    """The verdict on an attempt that reached max_turns or max_tokens. train: it is judged as it is. mask: it is left
    out of its group."""
    on_failure: Verdict = Verdict.MASK
    """The verdict on an attempt whose environment raised an error, took too long, died, or answered with something
    that is no answer. mask: it is left out of its group. retry: it begins again. train: it is judged as it is."""
    max_retries: Annotated[int, Range(0, 1000)] = 2
    """Greatest number of times that one attempt begins again."""
    workers: Annotated[int, Range(1, 1024)] = 2
    """Number of processes that sessions share. At most four times as many have a single session, under which several
    shared ones have ended."""
    step_timeout_s: Seconds = 60.0
    """Seconds that an environment may take to begin a session, or to answer one turn."""
    memory_gb: Annotated[float, Range(0.25, 100_000)] = 8.0
    """Greatest memory in GiB of one of the processes. A session that needs more fails."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.on_limit is Verdict.RETRY:
            raise SettingError(
                "on_limit", "must be train or mask", got="retry", why="an attempt would reach the same limit again"
            )
