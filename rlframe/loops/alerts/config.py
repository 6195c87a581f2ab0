"""Settings of alerts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from rlframe.loops.alerts.rules import (
    EntropyCollapsed,
    EntropyCollapsedConfig,
    FewEffective,
    FewEffectiveConfig,
    GapGrows,
    GapGrowsConfig,
    GroupsFlat,
    GroupsFlatConfig,
    LengthsExplode,
    LengthsExplodeConfig,
    NotFinite,
    NotFiniteConfig,
    Repetitive,
    RepetitiveConfig,
    RewardFlat,
    RewardFlatConfig,
    RewardsFail,
    RewardsFailConfig,
    Slow,
    SlowConfig,
    Truncated,
    TruncatedConfig,
)
from rlframe.utils.bounds import PathText, check_bounds
from rlframe.utils.errors import SettingError

NAME = re.compile(r"[a-z0-9_]+")


@dataclass(kw_only=True, slots=True)
class OwnAlertConfig:
    """An alert of one's own."""

    name: Annotated[str, PathText()]
    """A class derived from rlframe.Alert: `path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the alert: the fields of its dataclass."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(kw_only=True, slots=True)
class AlertsConfig:
    """Settings of alerts. Each is said once in a run, on the terminal, in warnings.jsonl and in report.html. null
    switches one off."""

    stop: list[str] = field(default_factory=list)
    """Names of the alerts that end the run with code 1 after the step, which is saved if a checkpoint is due."""
    own: dict[str, OwnAlertConfig] = field(default_factory=dict)
    """Alerts of one's own, by name."""
    not_finite: NotFiniteConfig | None = field(default_factory=NotFiniteConfig)
    """A loss or a gradient is not finite."""
    slow: SlowConfig | None = field(default_factory=SlowConfig)
    """Tokens a second have fallen."""
    reward_flat: RewardFlatConfig | None = field(default_factory=RewardFlatConfig)
    """The reward is where it was at the start."""
    rewards_fail: RewardsFailConfig | None = field(default_factory=RewardsFailConfig)
    """Reward functions raise or take too long."""
    groups_flat: GroupsFlatConfig | None = field(default_factory=GroupsFlatConfig)
    """In nearly all groups all rewards are equal."""
    entropy_collapsed: EntropyCollapsedConfig | None = field(default_factory=EntropyCollapsedConfig)
    """The policy's entropy is near 0."""
    truncated: TruncatedConfig | None = field(default_factory=TruncatedConfig)
    """Most responses are cut off."""
    repetitive: RepetitiveConfig | None = field(default_factory=RepetitiveConfig)
    """Responses repeat themselves."""
    lengths_explode: LengthsExplodeConfig | None = field(default_factory=LengthsExplodeConfig)
    """Responses become long fast."""
    gap_grows: GapGrowsConfig | None = field(default_factory=GapGrowsConfig)
    """Trainer and engine drift apart."""
    few_effective: FewEffectiveConfig | None = field(default_factory=FewEffectiveConfig)
    """The effective sample size of the importance weights is low."""

    def __post_init__(self) -> None:
        for name in self.own:
            if not NAME.fullmatch(name) or name in self.__dataclass_fields__:
                raise SettingError(
                    "own",
                    "must have names of small letters, digits and underscores that no other alert has",
                    got=repr(name),
                )
        known = sorted([*(name for name, _ in self.given()), *self.own])
        if unknown := [name for name in self.stop if name not in known]:
            raise SettingError("stop", f"must name alerts that are on: {', '.join(known)}", got=repr(unknown[0]))

    def given(self) -> Iterator[tuple[str, Any]]:
        """Yields name and settings of each alert of the package that is on."""
        for each in fields(self):
            if each.name not in ("stop", "own") and (settings := getattr(self, each.name)) is not None:
                yield each.name, settings


CLASSES: dict[type, type] = {
    NotFiniteConfig: NotFinite,
    SlowConfig: Slow,
    RewardFlatConfig: RewardFlat,
    RewardsFailConfig: RewardsFail,
    GroupsFlatConfig: GroupsFlat,
    EntropyCollapsedConfig: EntropyCollapsed,
    TruncatedConfig: Truncated,
    RepetitiveConfig: Repetitive,
    LengthsExplodeConfig: LengthsExplode,
    GapGrowsConfig: GapGrows,
    FewEffectiveConfig: FewEffective,
}
"""The alert of each kind of settings."""
ONLINE = frozenset({"reward_flat", "rewards_fail", "groups_flat", "entropy_collapsed", "truncated", "repetitive"}) | {
    "lengths_explode", "gap_grows", "few_effective",
}  # fmt: skip
"""Alerts about metrics that only training on rollouts has."""
