"""Differences of a driver that is a job of `ray job submit`."""

import json
import os
from collections.abc import Mapping
from typing import Any

CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the process of a job."""
OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
VARIABLES = "env_vars"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Variable of the job's runtime environment: seconds between the SIGTERM and the SIGKILL of `ray job stop`."""
STOP_WAIT_S = 3
"""Its default in Ray 2.60."""


def conflicts(environment: Mapping[str, Any]) -> list[str]:
    """Returns what the runtime environment of this job and `environment` both set, by dotted name. Ray refuses that,
    unless a variable tells it that the run's own counts."""
    if os.environ.get(OVERRIDE) == "1":
        return []
    theirs = json.loads(os.environ.get(CONFIG) or "{}").get("runtime_env") or {}
    both = [name for name in environment if name in theirs and name != VARIABLES]
    names = environment.get(VARIABLES, {}).keys() & theirs.get(VARIABLES, {}).keys()
    return sorted([*both, *(f"{VARIABLES}.{name}" for name in names)])


def caution(on_signal_s: float) -> str | None:
    """Returns a warning if `ray job stop` would kill this run before it has saved. None if it would not.

    Args:
        on_signal_s: seconds that the step under way may take after a signal.
    """
    if CONFIG not in os.environ or on_signal_s == 0:
        return None
    given = os.environ.get(STOP_WAIT, "")
    wait_s = int(given) if given.isdigit() else STOP_WAIT_S
    if wait_s >= on_signal_s:
        return None
    return (
        f"`ray job stop` kills this run {wait_s} s after its SIGTERM, and checkpoint.on_signal_s={on_signal_s:g} lets "
        "a step take longer before it is saved; submit with --runtime-env-json "
        f'\'{{"env_vars": {{"{STOP_WAIT}": "{on_signal_s + 300:.0f}"}}}}\''
    )
