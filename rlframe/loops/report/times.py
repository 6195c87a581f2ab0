"""The time of a run, by role and phase."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FIRST_STEPS, LAST_STEPS = 3, 40
"""Numbers of steps at the beginning and at the end of a run whose phases are drawn one by one."""


def times(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the seconds of each role's phases over the whole run, its idle seconds, and single phases of the first
    and last steps.

    Args:
        lines: of timeline.jsonl.
    """
    read = [line for line in lines if isinstance(line.get("phases"), list)]
    busy: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    whole = 0.0
    for line in read:
        phases: Sequence[Mapping[str, Any]] = line["phases"]
        if not phases:
            continue
        whole += max(each["end_s"] for each in phases) - min(each["start_s"] for each in phases)
        for each, own in zip(phases, _own_seconds(phases), strict=True):
            busy[each["role"]][each["name"]] += own
    roles = [
        {
            "role": role,
            "phases": {name: round(value, 3) for name, value in sorted(own.items(), key=lambda one: -one[1])},
            "idle_s": round(max(0.0, whole - sum(own.values())), 3),
        }
        for role, own in sorted(busy.items())
    ]
    drawn = read if len(read) <= FIRST_STEPS + LAST_STEPS else [*read[:FIRST_STEPS], *read[-LAST_STEPS:]]
    return {"roles": roles, "seconds": round(whole, 3), "steps": [dict(line) for line in drawn]}


def _own_seconds(phases: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the seconds of each phase without those of phases inside it, which end before it in the list."""
    own: list[float] = []
    for place, each in enumerate(phases):
        inside = 0.0
        reached = each["end_s"]
        for earlier in reversed(phases[:place]):
            if earlier["start_s"] < each["start_s"]:
                break
            # Of phases inside phases only the outer ones count.
            if earlier["end_s"] <= reached:
                inside += earlier["end_s"] - earlier["start_s"]
                reached = earlier["start_s"]
        own.append(max(0.0, each["end_s"] - each["start_s"] - inside))
    return own
