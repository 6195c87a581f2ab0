"""Settings of the rewards. Light: imports no reward."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class RewardPart:
    """One reward function and what it counts."""

    name: str
    """A file of rlframe/rewards, or a function of yours: `path/to/file.py:function` or `package.module:function`."""
    weight: float = 1.0
    """The part is multiplied by it in the sum; 0 only logs it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the reward itself: the fields of its config class."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must name a reward, got ''")
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be finite, got {self.weight}")


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """How rollouts are judged: the weighted sum of the parts."""

    parts: dict[str, RewardPart] = field(default_factory=dict)
    """Reward functions, by the name they have in metrics and in `Rollout.reward_parts`."""
    timeout_s: float = 5.0
    """Limit for one part on one rollout. A part that takes longer counts as 0, and the rollout as failed."""
    workers: int = 2
    """Processes that judge in parallel."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0 seconds, got {self.timeout_s}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
