"""Reads what a run has left in its folder: a finished one, one that was killed, or one that is running."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlframe.utils.errors import OutputError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The safe loader of YAML; in C, ten times as fast, where PyYAML was built with it."""


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file of JSON lines. None if it is missing; a half-written line ends it."""
    try:
        # In bytes: a text may hold line breaks at which str.splitlines would split.
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record


def read_yaml(file: Path) -> Any:
    """Returns what a YAML file holds. None if there is none, or none that can be read."""
    try:
        return yaml.load(file.read_bytes(), Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def settings_of(output: Path) -> Mapping[str, Any]:
    """Returns the configuration of a run.

    Raises:
        OutputError: the folder is not that of a run.
    """
    settings = read_yaml(output / "config.yaml")
    if not isinstance(settings, dict) or "steps" not in settings:
        raise OutputError(f"{output} is not the folder of a run: it has no readable config.yaml; give a run's `output`")
    return settings
