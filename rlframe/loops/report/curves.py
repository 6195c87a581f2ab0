"""The metrics of a run as columns, the ones that matter first."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rlframe.loops.report.meanings import FIRST, meaning

MOST_POINTS = 2000
"""Greatest number of points of a curve. A longer one is thinned out evenly."""
DIGITS = 6
"""Significant digits of a point."""


def curves(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a curve for each metric: its name, its meaning if that is known, steps and values.

    Args:
        records: the lines of metrics.jsonl.
    """
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                found[name][step] = value
    order = {name: place for place, name in enumerate(FIRST)}
    names = sorted(found, key=lambda name: (order.get(name, len(order)), name))
    return [_curve(name, found[name]) for name in names]


def _curve(name: str, points: Mapping[int, float]) -> dict[str, Any]:
    steps = sorted(points)
    stride = math.ceil(len(steps) / MOST_POINTS)
    # The last point is always among them.
    steps = steps[(len(steps) - 1) % stride :: stride]
    return {
        "name": name,
        "meaning": meaning(name),
        "first": name in FIRST,
        "steps": steps,
        "values": [_short(points[step]) for step in steps],
    }


def _short(value: float) -> float | None:
    """Returns a value with few digits. None stands for one that is not finite, which JSON lacks."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
