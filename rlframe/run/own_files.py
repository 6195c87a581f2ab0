"""Files of the user's that settings name: rewards, algorithms, tools. A run is made of their text too."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rlframe.loops.report.files import read_yaml
from rlframe.utils.files.whole import write_whole
from rlframe.utils.nested import flat
from rlframe.utils.outside import SOURCES

logger = logging.getLogger(__name__)
FILES = "files.yaml"


def remember(folder: Path, plain: Mapping[str, Any]) -> None:
    """Writes the SHA-256 of each file that a setting names as `path/to/file.py:Name` into `files.yaml` of the run's
    folder, if there are any. Warns of those that are not as they were when the run was last begun: a repaired reward
    may go on, but not in silence."""
    here, there = dict(_digests(plain)), read_yaml(folder / FILES) or {}
    for place in sorted(here):
        if there.get(place, here[place]) != here[place]:
            logger.warning(
                "%s has changed since this run was begun in %s: what comes from now on is by the file as it is; "
                "output=ANOTHER begins anew", place, folder,
            )  # fmt: skip
    if here:
        write_whole(folder / FILES, yaml.safe_dump(here).encode())


def _digests(plain: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for value in flat(plain).values():
        if not (isinstance(value, str) and (place := value.rpartition(":")[0]).endswith(".py")):
            continue
        # What the driver has not read, such as a reward, its workers read.
        with suppress(OSError):
            text = SOURCES[place][1].encode() if place in SOURCES else Path(place).expanduser().read_bytes()
            # What the driver has read has the line ends of text.
            yield place, hashlib.sha256(text.replace(b"\r\n", b"\n")).hexdigest()
