"""The results of mode=evaluate: a file, and a table for the terminal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlframe.loops.evaluation.sets import Evaluated
from rlframe.loops.reporting.responses import record_of
from rlframe.utils.files.whole import whole_file, write_whole
from rlframe.utils.text import json_line

RESULTS, RESPONSES = "results.json", "responses.jsonl"
ERROR = "_error"
"""Ends the name of the standard error of the metric that is named before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one set."""

    count: int
    """Number of prompts, or of items of offline data."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of sampling. Empty for offline data."""
    metrics: Mapping[str, float]


def result_of(evaluated: Evaluated) -> Result:
    """Returns the result of a set whose responses were sampled."""
    chosen = evaluated.set
    settings = {"samples_per_prompt": chosen.samples_per_prompt, **asdict(chosen.sampling)}
    return Result(count=len(chosen.prompts), settings=settings, metrics=evaluated.metrics())


def write_results(folder: Path, results: Mapping[str, Result], *, model: str, seconds: Mapping[str, Any]) -> None:
    """Writes the results of all sets, by name, to `results.json`.

    Args:
        model: path of the model.
        seconds: seconds of the parts of the evaluation.
    """
    values = {"model": model, "sets": {name: asdict(result) for name, result in results.items()}, "seconds": seconds}
    # NaN is no JSON.
    text = json.dumps(finite(values), indent=2, allow_nan=False)
    write_whole(folder / RESULTS, f"{text}\n".encode())


def finite(value: Any) -> Any:
    """Returns plain values with None in the place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value


def write_responses(folder: Path, evaluated: Sequence[Evaluated]) -> None:
    """Writes the responses of all sets to `responses.jsonl`."""
    with whole_file(folder / RESPONSES) as aside, aside.open("w", encoding="utf-8") as out:
        for each in evaluated:
            for group in each.groups:
                record = record_of(group, num_attempts=each.set.samples_per_prompt)
                out.write(json_line({"set": each.set.name, **record}))


def table(results: Mapping[str, Result]) -> str:
    """Returns a line for each set, with the standard error of a metric behind it."""
    shown = list(dict.fromkeys(name for each in results.values() for name in told(each.metrics)))
    titles = [name.removesuffix("_mean").replace("_at_", "@").replace("_", " ") for name in shown]
    rows = [["set", "count", "samples", *titles]]
    for name, each in results.items():
        samples = str(each.settings.get("samples_per_prompt", "-"))
        rows.append([name, str(each.count), samples, *(cell(each.metrics, column) for column in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def told(metrics: Mapping[str, float]) -> list[str]:
    """Returns the metrics that the table shows: all but standard errors and faults that did not occur."""
    faults = ("reward_failed_fraction", "lost_attempts")
    return [name for name in metrics if not name.endswith(ERROR) and (name not in faults or metrics[name] > 0)]


def cell(metrics: Mapping[str, float], name: str) -> str:
    """Returns a number of the table, with its standard error if there is one."""
    if name not in metrics:
        return "-"
    error = metrics.get(f"{name.removesuffix('_mean')}{ERROR}")
    value = f"{metrics[name]:.4g}"
    return value if error is None or error - error != 0 else f"{value} +- {error:.2g}"
