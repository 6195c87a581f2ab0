"""Needs of a run on the nodes of a joined cluster. Imports no ray."""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Needs of a run on every node where it has workers."""

    output: pathlib.Path
    """The folder of the run, which the workers write to and the driver reads."""
    files: Mapping[str, str]
    """Path of a file by the dotted key of the setting that names its folder."""
    packages: Mapping[str, str]
    """Name of a package by the dotted key of the setting that needs it."""
