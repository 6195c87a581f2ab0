"""The interface of a tracker, and what a run's folder remembers of it."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlframe.utils.files.whole import write_whole

REMEMBERED = "trackers.json"
"""File of the run's folder with the names that trackers gave the run."""
COLUMNS = ("step", "id", "prompt", "response", "answer", "reward", "finish_reason")
"""Columns of a table of samples."""
EVALUATED = "evaluation/policy_version"
"""Metric of an evaluation beside training: the step whose weights sampled it."""


class Tracker(Protocol):
    """Gets the numbers of a run."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step."""
        ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rollouts of a step, as lines of samples.jsonl."""
        ...

    def rewind(self, done_steps: int | None) -> None:
        """Notes that the steps after `done_steps` run again, or all and what comes before them if it is None."""
        ...

    def close(self, *, failed: bool) -> None:
        """Ends the run there, as failed or finished."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """A run as trackers show it."""

    folder: pathlib.Path
    name: str
    config: Mapping[str, Any]
    group: str | None
    tags: tuple[str, ...]

    def remembered(self, tracker: str) -> str | None:
        """Returns the name of this run at `tracker`. None if it is new there."""
        return _read(self.folder).get(tracker)

    def remember(self, tracker: str, name: str) -> None:
        """Keeps the name of this run at `tracker`, so that a resumed run goes on there."""
        known = _read(self.folder) | {tracker: name}
        write_whole(self.folder / REMEMBERED, json.dumps(known, indent=1).encode())


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns the cells of `COLUMNS` for each sample."""
    return [[_cell(row.get(column)) for column in COLUMNS] for row in rows]


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else "" if value is None else json.dumps(value, default=str)


def _read(folder: pathlib.Path) -> dict[str, str]:
    file = folder / REMEMBERED
    return json.loads(file.read_bytes()) if file.exists() else {}
