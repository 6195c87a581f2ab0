"""Settings of mode=self_test."""

from dataclasses import dataclass, field
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds


@dataclass(kw_only=True, slots=True)
class SelfTestConfig:
    """Settings of mode=self_test: a few steps of the recipe at learning rate 0, which must change nothing."""

    steps: Annotated[int, Range(3, 10**6)] = 5
    """Number of steps."""
    without: list[str] = field(default_factory=list)
    """Names of checks to leave out: files of rlframe/loops/self_test/checks."""
    further_checks: list[str] = field(default_factory=list)
    """Checks of your own, as path/to/file.py:Class or package.module:Class."""
    gap_limit_nats: Annotated[float, Range(above=0, maximum=100)] | None = None
    """Mean absolute difference of the logprobs of engine and trainer, in nats, at which checks fail. A third of it
    warns. null means 0.003 where both compute in float32. Else it means 0.06, or more for a model that rounding moves
    more: twice the change of its logprobs when the last bit of every weight flips, at most 0.2; half of that warns."""
    leak_limit_mb: Annotated[float, Range(above=0, maximum=10**6)] = 32.0
    """Memory, in MB (1e6 bytes) of any process, whose growth in each step fails. A step's growth counts from the third
    step on."""

    def __post_init__(self) -> None:
        check_bounds(self)
