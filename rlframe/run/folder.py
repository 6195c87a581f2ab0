"""The run's folder. It belongs to one configuration, so that a resumed run is the same run, and to one process at a
time."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlframe.loops.saving.manifest import claim_owner
from rlframe.run.config import RunConfig
from rlframe.utils.build import as_dict
from rlframe.utils.errors import CheckpointError, ConfigError, OutputError
from rlframe.utils.faults import Fault
from rlframe.utils.files import write_whole, writing
from rlframe.utils.lock import FolderLock
from rlframe.utils.secrets import hidden, without_secrets

OVERRIDES = "overrides.yaml"
FREE_ON_RESUME = (
    "output",
    "steps",
    "logging",
    "cluster",
    "data.cache_folder",
    "data.cache_gb",
    "train.parallel",
    "critic.train.parallel",
    "critic.colocate",
    *(
        f"checkpoint.{field}"
        for field in (
            "every_steps",
            "keep_last",
            "keep_best",
            "best_mode",
            "asynchronous",
            "verify",
            "on_signal_s",
            "export",
            "export_every_steps",
            "export_shard_gb",
        )
    ),
)
"""Keys and sections that may differ when a run is resumed. They change how long, where and how verbosely it runs, not
its results. Another layout sums in another order, so that numbers agree up to rounding, not bit for bit."""


def claim(run: RunConfig, overrides: Sequence[str] = ()) -> FolderLock:
    """Creates the run's folder if needed and returns its lock. Writes the resolved configuration to `config.yaml`, what
    the command set beyond its config file to `overrides.yaml`, and the run's identity to `run.json`. The folder belongs
    to this process until the lock is closed.

    A folder with the same configuration is a run to resume. Settings of FREE_ON_RESUME may differ, such as `steps`,
    `cluster.*` and `train.parallel`.

    Raises:
        ConfigError: the folder cannot be written to, is in use by another process, or belongs to a run with another
            configuration; the message names each key with both values.
    """
    folder = Path(run.output)
    try:
        with writing(folder):
            if folder.exists() and not folder.is_dir():
                raise ConfigError([Fault("output", "must be a folder", got=f"the file {folder}")])
            folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder.absolute())
        try:
            _settle(folder, without_secrets(as_dict(run)))
            write_whole(folder / OVERRIDES, yaml.safe_dump([hidden(each) for each in overrides]).encode())
        except BaseException:
            lock.close()
            raise
    except (CheckpointError, OutputError) as error:
        raise ConfigError([Fault("output", said=error)]) from error
    return lock


def _settle(folder: Path, plain: dict[str, Any]) -> None:
    """Writes the configuration into the folder, or compares it with the one that is there."""
    file = folder / "config.yaml"
    if file.exists():
        _refuse_another_run(file, plain)
    fixed = {key: value for key, value in _flat(plain) if not _free(key)}
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()
    claim_owner(folder, digest)
    write_whole(file, yaml.safe_dump(plain, sort_keys=False).encode())


def _refuse_another_run(file: Path, plain: dict[str, Any]) -> None:
    try:
        there = dict(_flat(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Fault("output", said=f"{file} is not readable YAML, choose another folder: {error}")]
        ) from error
    here = dict(_flat(plain))
    faults = [
        Fault("output", said=f"{file} has {key}={there.get(key, 'nothing')}, this run has {here.get(key, 'nothing')}")
        for key in here | there
        if there.get(key) != here.get(key) and not _free(key)
    ]
    if faults:
        raise ConfigError(
            [*faults, Fault("output", "must be a separate folder for each configuration", why="set output=ANOTHER")]
        )


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the scalars and lists of a nested dict by dotted key."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
