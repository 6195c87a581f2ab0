"""Soft penalty for responses near the token limit."""

from dataclasses import dataclass
from typing import Annotated

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class LengthConfig:
    """Start and end of the penalty. Its size is the part's weight."""

    max_tokens: Annotated[int, Range(1, 1 << 24)]
    """Response length L_max from which on the reward is -1. Usually `rollout.max_tokens`."""
    cache_tokens: Annotated[int, Range(1, 1 << 24)]
    """Length L_cache of the stretch before `max_tokens` over which the reward falls from 0 to -1."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.cache_tokens > self.max_tokens:
            raise SettingError("cache_tokens", f"must be at most max_tokens={self.max_tokens}", got=self.cache_tokens)


class Length(Reward):
    """DAPO's soft overlong penalty: 0 up to L_max - L_cache tokens, linear down to -1 at L_max, -1 beyond.

    Source: arXiv 2503.14476 equation 13; verl `workers/reward_manager/dapo.py` (which has no lower bound).
    """

    def __init__(self, config: LengthConfig):
        self._config = config

    def score(self, attempt: Attempt) -> float:
        """Returns a number in [-1, 0]."""
        expected = self._config.max_tokens - self._config.cache_tokens
        excess = attempt.num_response_tokens - expected
        return -min(max(excess / self._config.cache_tokens, 0.0), 1.0)


COMPONENT, CONFIG = Length, LengthConfig
