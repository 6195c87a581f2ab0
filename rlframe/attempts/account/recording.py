"""Recordings: the groups that each step of a run was trained on, from which the run's training can be repeated.

`rollouts/` in the run's folder has `recording.json`, which says what they were recorded with, and for each step a
folder of groups.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlframe.attempts.account.stored import GROUPS
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.sealed import read_sealed, write_sealed
from rlframe.utils.files.whole import writing

ROLLOUTS = "rollouts"
RECORDING = "recording.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Settings and tokenizer with which a run's groups were recorded."""

    run: str
    """Id of the run in its `run.json`."""
    settings: Mapping[str, Any]
    """Settings that shape the groups, by dotted key, as plain JSON values."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    format: int = FORMAT


def begin_recording(output: Path, recording: Recording) -> None:
    """Writes what a run's groups are recorded with. A resumed run writes the same again.

    Raises:
        OutputError: the file cannot be written.
    """
    folder = output / ROLLOUTS
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / RECORDING, asdict(recording))


def read_recording(output: Path) -> Recording:
    """Returns what the groups of the run in `output` were recorded with.

    Raises:
        CheckpointError: there is no recording, or it is damaged or of another format.
    """
    file = output / ROLLOUTS / RECORDING
    content = read_sealed(file)
    if set(content) != {field.name for field in fields(Recording)} or content["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {content.get('format')}, this version of rlframe replays format {FORMAT}"
        )
    return Recording(**content)


def step_folder(output: Path, step: int) -> Path:
    """Returns the folder of a step's groups."""
    return output / ROLLOUTS / f"step-{step:08d}"


def forget_after(output: Path, step: int) -> None:
    """Removes the groups of the steps that follow `step` without a gap.

    Raises:
        OutputError: they cannot be removed.
    """
    while (folder := step_folder(output, step := step + 1)).exists():
        with writing(folder):
            shutil.rmtree(folder)


def missing_steps(output: Path, steps: int) -> list[int]:
    """Returns which of the first `steps` steps have no groups in the recording."""
    return [step for step in range(1, steps + 1) if not (step_folder(output, step) / GROUPS).is_file()]
