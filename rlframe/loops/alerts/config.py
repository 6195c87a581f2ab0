"""Settings of alerts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from rlframe.loops.alerts import rules
from rlframe.utils.bounds import PathText
from rlframe.utils.errors import SettingError

NAME = re.compile(r"[a-z0-9_]+")


@dataclass(kw_only=True, slots=True)
class OwnAlertConfig:
    """An alert of one's own."""

    name: Annotated[str, PathText()]
    """A class derived from rlframe.Alert: `path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the alert: the fields of its dataclass."""


@dataclass(kw_only=True, slots=True)
class AlertsConfig:
    """Settings of alerts. Each is said once in a run, on the terminal, in warnings.jsonl and in report.html. null
    switches one off."""

    stop: list[str] = field(default_factory=list)
    """Names of the alerts that end the run with code 1 after the step, which is saved if a checkpoint is due."""
    own: dict[str, OwnAlertConfig] = field(default_factory=dict)
    """Alerts of one's own, by name."""
    not_finite: rules.NotFiniteConfig | None = field(default_factory=rules.NotFiniteConfig)
    """A loss or a gradient is not finite."""
    slow: rules.SlowConfig | None = field(default_factory=rules.SlowConfig)
    """Tokens a second have fallen."""
    reward_flat: rules.RewardFlatConfig | None = field(default_factory=rules.RewardFlatConfig)
    """The reward is where it was at the start."""
    rewards_fail: rules.RewardsFailConfig | None = field(default_factory=rules.RewardsFailConfig)
    """Reward functions raise or take too long."""
    groups_flat: rules.GroupsFlatConfig | None = field(default_factory=rules.GroupsFlatConfig)
    """In nearly all groups all rewards are equal."""
    entropy_collapsed: rules.EntropyCollapsedConfig | None = field(default_factory=rules.EntropyCollapsedConfig)
    """The policy's entropy is near 0."""
    truncated: rules.TruncatedConfig | None = field(default_factory=rules.TruncatedConfig)
    """Most responses are cut off."""
    repetitive: rules.RepetitiveConfig | None = field(default_factory=rules.RepetitiveConfig)
    """Responses repeat themselves."""
    lengths_explode: rules.LengthsExplodeConfig | None = field(default_factory=rules.LengthsExplodeConfig)
    """Responses become long fast."""
    gap_grows: rules.GapGrowsConfig | None = field(default_factory=rules.GapGrowsConfig)
    """Trainer and engine drift apart."""
    few_effective: rules.FewEffectiveConfig | None = field(default_factory=rules.FewEffectiveConfig)
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
    rules.NotFiniteConfig: rules.NotFinite,
    rules.SlowConfig: rules.Slow,
    rules.RewardFlatConfig: rules.RewardFlat,
    rules.RewardsFailConfig: rules.RewardsFail,
    rules.GroupsFlatConfig: rules.GroupsFlat,
    rules.EntropyCollapsedConfig: rules.EntropyCollapsed,
    rules.TruncatedConfig: rules.Truncated,
    rules.RepetitiveConfig: rules.Repetitive,
    rules.LengthsExplodeConfig: rules.LengthsExplode,
    rules.GapGrowsConfig: rules.GapGrows,
    rules.FewEffectiveConfig: rules.FewEffective,
}
"""The alert of each kind of settings."""
ONLINE = frozenset({"reward_flat", "rewards_fail", "groups_flat", "entropy_collapsed", "truncated", "repetitive"}) | {
    "lengths_explode", "gap_grows", "few_effective",
}  # fmt: skip
"""Alerts about metrics that only training on rollouts has."""
