"""The alerts of every run: each a class and its settings."""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, ClassVar, TypeVar

import numpy as np

from rlframe.loops.alerts.base import Alert
from rlframe.utils.bounds import Range, check_bounds

Steps = Annotated[int, Range(1, 10**6)]


@dataclass(kw_only=True, slots=True)
class NotFiniteConfig:
    """Settings of the alert about infinite numbers and numbers that are none."""

    metrics: list[str] = field(
        default_factory=lambda: ["train/loss", "train/grad_norm", "critic/loss", "critic/grad_norm"]
    )
    """Metrics that must be finite."""


class NotFinite(Alert[NotFiniteConfig]):
    """A loss or a gradient is not finite."""

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """See Alert."""
        found = [name for name in self.config.metrics if not math.isfinite(metrics.get(name, 0.0))]
        if not found:
            return None
        return (
            f"{found[0]} is {metrics[found[0]]}, which is not finite: look for infinite rewards or logprobs in "
            "samples.jsonl, and lower train.optimizer.lr"
        )


@dataclass(kw_only=True, slots=True)
class LimitConfig:
    """Settings of an alert about a metric that stays beyond a limit."""

    limit: Annotated[float, Range(-(10**9), 10**9)] = 0.0
    """Value beyond which it is too far."""
    steps: Steps = 10
    """Number of steps in a row for which it must be."""

    def __post_init__(self) -> None:
        check_bounds(self)


Limited = TypeVar("Limited", bound=LimitConfig)


class Limit(Alert[Limited]):
    """A metric stays beyond a limit."""

    metric: ClassVar[str]
    above: ClassVar[bool] = True
    """Whether values above the limit, or at it, are too far. Otherwise those below."""
    advice: ClassVar[str]

    def __init__(self, config: Limited):
        super().__init__(config)
        self._in_a_row = 0

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """See Alert."""
        value, limit = metrics.get(self.metric), self.config.limit
        if value is None:
            return None
        self._in_a_row = self._in_a_row + 1 if (value >= limit if self.above else value < limit) else 0
        if self._in_a_row < self.config.steps:
            return None
        side = "at least" if self.above else "below"
        return f"{self.metric} is {value:.4g}, {side} {limit:g} for {self.config.steps} steps: {self.advice}"


@dataclass(kw_only=True, slots=True)
class GroupsFlatConfig(LimitConfig):
    """Settings of the alert about groups whose rewards are all equal."""

    limit: Annotated[float, Range(0, 1)] = 0.95
    """Fraction of the groups."""


class GroupsFlat(Limit[GroupsFlatConfig]):
    """In nearly all groups all rewards are equal."""

    metric = "reward/flat_groups_fraction"
    advice = (
        "nothing is learnt from a group whose rewards are equal; use easier or harder prompts, larger groups "
        "(algorithm.group_size) or algorithm.dynamic_sampling"
    )


@dataclass(kw_only=True, slots=True)
class EntropyCollapsedConfig(LimitConfig):
    """Settings of the alert about an entropy near 0."""

    limit: Annotated[float, Range(0, 100)] = 0.01
    """Nats."""


class EntropyCollapsed(Limit[EntropyCollapsedConfig]):
    """The policy says the same thing whatever happens."""

    metric = "train/entropy_nats"
    above = False
    advice = (
        "the policy has nothing left to try; lower train.optimizer.lr, raise algorithm.clip_high or "
        "algorithm.entropy_coefficient, and go back to an earlier checkpoint"
    )


@dataclass(kw_only=True, slots=True)
class TruncatedConfig(LimitConfig):
    """Settings of the alert about responses that are cut off."""

    limit: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of the sequences."""
    steps: Steps = 20
    """Number of steps in a row for which it must be, without becoming less."""


class Truncated(Limit[TruncatedConfig]):
    """Most responses are cut off, and it does not become less: a policy may begin so, and learn to end."""

    metric = "rollout/truncated_fraction"
    advice = (
        "what is cut off is judged as if it were whole; raise rollout.max_tokens, set algorithm.mask_truncated=true, "
        "or look in samples.jsonl for responses that never end"
    )

    def __init__(self, config: TruncatedConfig):
        super().__init__(config)
        self._last: deque[float] = deque(maxlen=config.steps)

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """See Alert."""
        self._last.append(metrics.get(self.metric, math.nan))
        found, values, half = super().look(step, metrics), list(self._last), self.config.steps // 2
        if not found or (half and median(values[-half:]) < median(values[:half])):
            return None
        return found


@dataclass(kw_only=True, slots=True)
class RepetitiveConfig(LimitConfig):
    """Settings of the alert about responses that repeat themselves."""

    limit: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of 4-grams that came before."""


class Repetitive(Limit[RepetitiveConfig]):
    """Responses repeat themselves."""

    metric = "rollout/repeated_fraction"
    advice = "read the longest ones in samples.jsonl; a reward that grows with length invites it"


@dataclass(kw_only=True, slots=True)
class RewardsFailConfig(LimitConfig):
    """Settings of the alert about rewards that fail."""

    limit: Annotated[float, Range(0, 1)] = 0.1
    """Fraction of the attempts."""


class RewardsFail(Limit[RewardsFailConfig]):
    """Rewards fail, and count 0."""

    metric = "reward/failed_fraction"
    advice = "reward functions raise or take too long; the log names them, reward.timeout_s is their limit"


@dataclass(kw_only=True, slots=True)
class FewEffectiveConfig(LimitConfig):
    """Settings of the alert about importance weights that are far apart."""

    limit: Annotated[float, Range(0, 1)] = 0.5
    """Effective sample size as a fraction of the tokens."""


class FewEffective(Limit[FewEffectiveConfig]):
    """The importance weights leave few tokens to learn from."""

    metric = "rollout/effective_fraction"
    above = False
    advice = (
        "engine and trainer, or an old policy and the present one, disagree so much that few tokens decide; see "
        "rollout/logprob_gap_mean_nats, lower loop.max_policy_lag, or set algorithm.correction.weight_cap=2"
    )


@dataclass(kw_only=True, slots=True)
class RewardFlatConfig:
    """Settings of the alert about a reward that does not rise."""

    steps: Annotated[int, Range(2, 10**6)] = 100
    """Number of first steps, and of last steps, whose means are compared."""
    errors: Annotated[float, Range(0, 1000)] = 2.0
    """Least rise, in standard errors of the difference."""

    def __post_init__(self) -> None:
        check_bounds(self)


class RewardFlat(Alert[RewardFlatConfig]):
    """The reward is where it was at the start."""

    def __init__(self, config: RewardFlatConfig):
        super().__init__(config)
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=config.steps)

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """See Alert."""
        steps, value = self.config.steps, metrics.get("reward/mean", math.nan)
        if math.isnan(value):
            return None
        if len(self._first) < steps:
            self._first.append(value)
            return None
        self._last.append(value)
        if len(self._last) < steps:
            return None
        first, last = np.array(self._first), np.array(self._last)
        before, now = float(first.mean()), float(last.mean())
        error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / steps)
        if now > before and now - before >= self.config.errors * error:
            return None
        return (
            f"reward/mean is {now:.4g} over the last {steps} steps and was {before:.4g} over the first {steps}, a rise "
            f"of less than {self.config.errors:g} standard errors ({error:.2g}): nothing has been learnt; see "
            "reward/flat_groups_fraction, read samples.jsonl, and try another train.optimizer.lr"
        )


@dataclass(kw_only=True, slots=True)
class ChangeConfig:
    """Settings of an alert about a metric that is far from what it was."""

    factor: Annotated[float, Range(above=1, maximum=10**6)] = 2.0
    """Factor between the median of the last steps and that of earlier ones."""
    steps: Steps = 10
    """Number of last steps."""
    earlier: Annotated[int, Range(1, 10**6)] = 50
    """Number of earlier steps."""

    def __post_init__(self) -> None:
        check_bounds(self)


Changed = TypeVar("Changed", bound=ChangeConfig)


class Change(Alert[Changed]):
    """A metric is far from what it was: medians of the last steps and of those before them."""

    metric: ClassVar[str]
    advice: ClassVar[str]

    def __init__(self, config: Changed):
        super().__init__(config)
        self._values: list[float] = []

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """See Alert."""
        if (value := metrics.get(self.metric)) is None:
            return None
        self._values.append(value)
        now, before = self.split(self._values)
        if len(now) < self.config.steps or len(before) < self.config.earlier:
            return None
        last, earlier = median(now), median(before)
        if not self.is_far(last, earlier):
            return None
        return (
            f"{self.metric} is {last:.4g} (median of the last {self.config.steps} steps) and was {earlier:.4g} before, "
            f"beyond a factor of {self.config.factor:g}: {self.advice}"
        )

    def split(self, values: list[float]) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the last values and the earlier ones, and forgets what neither needs."""
        del values[: -self.config.steps - self.config.earlier]
        return values[-self.config.steps :], values[: -self.config.steps]

    @abstractmethod
    def is_far(self, last: float, earlier: float) -> bool:
        """Returns whether the last median is too far from the earlier one."""


@dataclass(kw_only=True, slots=True)
class GapGrowsConfig(ChangeConfig):
    """Settings of the alert about a gap between trainer and engine that grows."""

    factor: Annotated[float, Range(above=1, maximum=10**6)] = 3.0
    """Factor between the median gap of the last steps and that of the run's first ones."""
    earlier: Annotated[int, Range(1, 10**6)] = 20
    """Number of first steps."""
    least_nats: Annotated[float, Range(0, 100)] = 0.02
    """Gap below which there is no alert."""


class GapGrows(Change[GapGrowsConfig]):
    """Trainer and engine drift apart."""

    metric = "rollout/logprob_gap_mean_nats"
    advice = (
        "trainer and engine drift apart; see weight_sync/probe_mean_nats (weight_sync.probe_every_steps), "
        "train.moe.router_replay and algorithm.correction"
    )

    def split(self, values: list[float]) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the last values and those of the run's first steps."""
        first = self.config.earlier
        del values[first : max(first, len(values) - self.config.steps)]
        return values[first:], values[:first]

    def is_far(self, last: float, earlier: float) -> bool:
        """Returns whether the gap has grown."""
        return last >= self.config.least_nats and last >= self.config.factor * earlier


@dataclass(kw_only=True, slots=True)
class LengthsExplodeConfig(ChangeConfig):
    """Settings of the alert about responses that become long fast."""

    factor: Annotated[float, Range(above=1, maximum=10**6)] = 2.0
    """Factor between the median length of the last steps and that of the steps before."""
    least_tokens: Annotated[int, Range(0, 1 << 24)] = 64
    """Length below which there is no alert."""


class LengthsExplode(Change[LengthsExplodeConfig]):
    """Responses become long fast."""

    metric = "rollout/response_tokens_mean"
    advice = (
        "responses grow faster than a policy learns to reason; see rollout/repeated_fraction and samples.jsonl, and "
        "whether a reward grows with length"
    )

    def is_far(self, last: float, earlier: float) -> bool:
        """Returns whether responses are much longer."""
        return last >= self.config.least_tokens and last >= self.config.factor * earlier


@dataclass(kw_only=True, slots=True)
class SlowConfig(ChangeConfig):
    """Settings of the alert about throughput that has fallen."""

    factor: Annotated[float, Range(above=1, maximum=10**6)] = 2.0
    """Factor between the median throughput of the steps before and that of the last steps."""
    steps: Steps = 20
    """Number of last steps."""
    least_s: Annotated[float, Range(0, 10**6)] = 1200.0
    """Seconds for which it must have been low: what else runs on a machine comes and goes."""


class Slow(Change[SlowConfig]):
    """The throughput has fallen, and steps take longer: shorter responses alone are no trouble."""

    metric = "throughput/tokens_per_s"
    advice = (
        "see which part of time/step_s has grown, rollout/engine_restarts and cluster/restarts, and whether something "
        "else runs on the machines"
    )

    def __init__(self, config: SlowConfig):
        super().__init__(config)
        self._seconds: list[float] = []
        self._slow_s = 0.0

    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """See Alert."""
        self._seconds.append(seconds := metrics.get("time/step_s", math.nan))
        found = super().look(step, metrics)
        last, earlier = self.split(self._seconds)
        if not found or not median(last) > median(earlier):
            self._slow_s = 0.0
            return None
        self._slow_s += seconds
        return found if self._slow_s >= self.config.least_s else None

    def split(self, values: list[float]) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the last values, and those before them or, while it is slow, those before it began."""
        if not self._slow_s:
            return super().split(values)
        del values[self.config.earlier : max(self.config.earlier, len(values) - self.config.steps)]
        return values[self.config.earlier :], values[: self.config.earlier]

    def is_far(self, last: float, earlier: float) -> bool:
        """Returns whether there are far fewer tokens a second."""
        return last * self.config.factor <= earlier
