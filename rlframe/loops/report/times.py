"""The time of a run, by role and phase."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlframe.loops.reporting.timeline import DRIVER

ENGINES = "rollout"
"""Role of the phases in which the loop works with the engines or waits for them."""
SAMPLING = "sampling"
"""Name of what engines do."""
FIRST_STEPS, LAST_STEPS = 3, 40
"""Numbers of steps at the beginning and at the end of a run whose phases are drawn one by one."""


def times(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the seconds of each role's phases over the whole run, its idle seconds, and single phases of the first
    and last steps. Engines that sample all the time are a role each.

    Args:
        lines: of timeline.jsonl.
    """
    read = [line for line in lines if isinstance(line.get("phases"), list)]
    if any("engines" in line for line in read):
        read = [_with_waits(line) for line in read]
    busy: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    engines: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    whole = 0.0
    for line in read:
        phases: Sequence[Mapping[str, Any]] = line["phases"]
        if not phases:
            continue
        whole += max(each["end_s"] for each in phases) - min(each["start_s"] for each in phases)
        for each, own in zip(phases, _own_seconds(phases), strict=True):
            busy[each["role"]][each["name"]] += own
        if "engines" in line:
            span_s = line["engines"]["end_s"] - line["engines"]["start_s"]
            for number, seconds in enumerate(line["engines"]["busy_s"]):
                engines[f"engine {number}"][0] += seconds
                engines[f"engine {number}"][1] += span_s
    roles = [_role(role, own, whole) for role, own in sorted(busy.items())]
    roles += [_role(name, {SAMPLING: seconds}, span_s) for name, (seconds, span_s) in engines.items()]
    drawn = read if len(read) <= FIRST_STEPS + LAST_STEPS else [*read[:FIRST_STEPS], *read[-LAST_STEPS:]]
    return {"roles": roles, "seconds": round(whole, 3), "steps": drawn}


def _role(role: str, phases: Mapping[str, float], whole: float) -> dict[str, Any]:
    return {
        "role": role,
        "phases": {name: round(value, 3) for name, value in sorted(phases.items(), key=lambda one: -one[1])},
        "idle_s": round(max(0.0, whole - sum(phases.values())), 3),
    }


def _with_waits(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line of a step of a run whose engines sample all the time: a phase on their role is the driver's wait
    for them, also in the first step, which says nothing of engines."""
    phases = [each | {"role": DRIVER} if each["role"] == ENGINES else each for each in line["phases"]]
    return {**line, "phases": phases}


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
