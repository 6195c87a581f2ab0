"""The request to record a process, and the recorders that follow it. Imports no torch."""

import pathlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rlframe.cluster.profiling.config import Tool


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The record that is wanted, and where it is written."""

    tool: Tool
    folder: str
    """Folder of the step's profiles."""
    name: str
    """Name of the process in the names of files: `policy_0`."""
    stacks: bool = False
    """Whether a trace holds Python functions."""

    @property
    def stem(self) -> pathlib.Path:
        """The path of the files without their suffix. Makes their folder."""
        folder = pathlib.Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / self.name


class Recorder(Protocol):
    """Records a process from `begin` to `end`."""

    def begin(self) -> None:
        """Begins to record."""
        ...

    def end(self) -> list[pathlib.Path]:
        """Ends the record. Returns its files."""
        ...

    def drop(self) -> None:
        """Ends the record without files."""
        ...

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Returns a block that has `name` in the record."""
        ...
