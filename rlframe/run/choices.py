"""Sections whose settings are those of a file that they name. Imports nothing."""

CHOICES = {
    "algorithm": "rlframe.algorithms",
    "rollout": "rlframe.rollout",
    "teacher.engine": "rlframe.rollout",
    "judge.engine": "rlframe.rollout",
}
"""Sections whose dataclass is that of the package's file `<section>.name`."""
OPTIONS = {
    "reward": ("rlframe.rewards", "reward.parts.NAME.options"),
    "environment": ("rlframe.environments", "environment.options"),
    "environment.tools": ("rlframe.environments.tools", "environment.options.tools.NAME.options"),
}
"""Packages of components whose settings are options of a section, and where those stand."""
