"""The run's folder. It belongs to one configuration, so that a resumed run is the same run, and to one process at a
time."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rlframe.data.text.template import day_read
from rlframe.loops.report.files import read_yaml
from rlframe.loops.saving.manifest import claim_owner, find_owner, named_checkpoints, step_of
from rlframe.megatron.config.optimizer import Schedule
from rlframe.models import tokenizer
from rlframe.models.hub import resolve
from rlframe.run.config import RunConfig
from rlframe.run.differences import differences
from rlframe.run.own_files import remember
from rlframe.utils.build import as_dict
from rlframe.utils.errors import CheckpointError, ConfigError, OutputError
from rlframe.utils.faults import Fault
from rlframe.utils.files.lock import FolderLock
from rlframe.utils.files.whole import write_whole, writing
from rlframe.utils.nested import flat
from rlframe.utils.secrets import without_secret, without_secrets

logger = logging.getLogger(__name__)
OVERRIDES = "overrides.yaml"
FREE_ON_RESUME = (
    "output",
    "steps",
    "logging",
    "alerts",
    "profile",
    "cluster",
    "data.cache_folder",
    "data.cache_gb",
    "data.num_processes",
    "train.parallel",
    "critic.train.parallel",
    "critic.colocate",
    *(
        f"checkpoint.{field}"
        for field in (
            "every_steps",
            "keep_last",
            "keep_best",
            "best_metric",
            "best_mode",
            "asynchronous",
            "verify",
            "read_back",
            "on_signal_s",
            "export",
            "export_every_steps",
            "export_shard_gb",
        )
    ),
)
"""Keys and sections that may differ when a run is resumed. They change how long, where and how verbosely it runs, not
its results. Another layout sums in another order, so that numbers agree up to rounding, not bit for bit."""

COURSES = ("train.optimizer", "critic.train.optimizer")
"""Sections whose decay_steps may change with `steps`, but not by itself."""


def dated(run: RunConfig) -> RunConfig:
    """Returns the run with the day that its chat template writes: that of its folder if it is resumed, that of the run
    itself in a mode that has a folder in it, else today. A template that writes none leaves the run as it is."""
    if run.data.chat_template_date is not None:
        return run
    words = tokenizer.load(resolve(run.model), chat_template=run.data.chat_template)
    folders = dict.fromkeys([run.folder, Path(run.output)])
    there = (flat(read_yaml(folder / "config.yaml") or {}).get("data.chat_template_date") for folder in folders)
    day = next(filter(None, there), None) or day_read(words, run.data)
    return replace(run, data=replace(run.data, chat_template_date=day))


def claim(run: RunConfig, overrides: Sequence[str] | None = None) -> FolderLock:
    """Creates the folder of the run in its mode, if needed, and returns its lock. Writes the resolved configuration to
    `config.yaml`, what the command set beyond its config file to `overrides.yaml`, the run's identity to
    `run.json`, and checksums of the user's own files to `files.yaml`. The folder belongs to this process until the lock
    is closed.

    A folder with the same configuration is a run to resume. Settings of FREE_ON_RESUME may differ, such as `steps`,
    `cluster.*` and `train.parallel`. Where the learning rate follows the run's length and the run was longer than
    its warm-up, another `steps` needs a decay_steps: that of the steps before, or a new one.

    Args:
        overrides: of the command. None means that no command began the run, so that they are its `differences`.

    Raises:
        ConfigError: the folder cannot be written to, is in use by another process, or belongs to a run with another
            configuration; the message names each key with both values.
    """
    folder = run.folder
    try:
        with writing(folder):
            _refuse_a_file(folder)
            folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            plain = without_secrets(as_dict(run))
            _settle(folder, plain)
            remember(folder, plain)
            written = differences(run) if overrides is None else overrides
            write_whole(folder / OVERRIDES, yaml.safe_dump([without_secret(each) for each in written]).encode())
        except BaseException:
            lock.close()
            raise
    except (CheckpointError, OutputError) as error:
        raise ConfigError([Fault("output", said=error)]) from error
    return lock


def compare(run: RunConfig) -> None:
    """Refuses a folder that belongs to another configuration, as `claim` does, but writes nothing.

    Raises:
        ConfigError: see `claim`.
    """
    try:
        _refuse_a_file(next(each for each in (run.folder, *run.folder.parents) if each.exists()))
        find_owner(run.folder, _compared(run.folder, without_secrets(as_dict(run))))
    except CheckpointError as error:
        raise ConfigError([Fault("output", said=error)]) from error


def _refuse_a_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError([Fault("output", "must be a folder", got=f"the file {folder}")])


def _settle(folder: Path, plain: dict[str, Any]) -> None:
    """Writes the configuration into the folder, or compares it with the one that is there."""
    claim_owner(folder, _compared(folder, plain))
    write_whole(folder / "config.yaml", yaml.safe_dump(plain, sort_keys=False).encode())


def _compared(folder: Path, plain: dict[str, Any]) -> str:
    """Returns the digest of a configuration after comparing it with the one that is in the folder."""
    file = folder / "config.yaml"
    if file.exists():
        _refuse_another_run(file, plain)
    fixed = {key: value for key, value in flat(plain).items() if not _free(key) and key not in _decays()}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()


def _refuse_another_run(file: Path, plain: dict[str, Any]) -> None:
    try:
        there = flat(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Fault("output", said=f"{file} is not readable YAML, choose another folder: {error}")]
        ) from error
    here = flat(plain)
    faults = [
        Fault("output", said=f"{file} has {key}={there.get(key, 'nothing')}, this run has {here.get(key, 'nothing')}")
        for key in here | there
        if there.get(key) != here.get(key) and not _free(key) and key not in _decays()
    ]
    if faults:
        raise ConfigError(
            [*faults, Fault("output", "must be a separate folder for each configuration", why="set output=ANOTHER")]
        )
    if done := [step_of(each) for each in named_checkpoints(file.parent / "checkpoints")]:
        if here["steps"] < max(done):
            why = f"{file.parent / 'checkpoints'} has that step"
            raise ConfigError([Fault("steps", f"must be at least {max(done)}", got=here["steps"], why=why)])
        if bent := list(_bent(file, there, here)):
            raise ConfigError(bent)


def _decays() -> list[str]:
    return [f"{section}.decay_steps" for section in COURSES]


def _bent(file: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields a fault for each learning rate that would leave its course without being told to."""
    for section in COURSES:
        before, now = _decay_steps(there, section), _decay_steps(here, section)
        if before == now or (before is not None and before <= there[f"{section}.warmup_steps"]):
            # The same course, or one that has not left its warm-up, which is the same whatever the run's length.
            continue
        key, schedule = f"{section}.decay_steps", here.get(f"{section}.schedule")
        asked = here.get(key) is not None
        if there["steps"] == here["steps"]:
            yield Fault(key, f"must be {before} as in {file}, or change together with steps", got=now)
        elif not asked:
            yield Fault(
                "steps",
                f"must be {there['steps']} as in {file}",
                got=here["steps"],
                why=f"{section}.schedule={schedule} follows the run's length, so that the learning rate would bend",
                hint=f"set {key}={before} to keep its course, or another number to give it a new one",
            )
        else:
            logger.info("%s=%s: the learning rate leaves the course that ended at %s", key, now, before)


def _decay_steps(flat: Mapping[str, Any], section: str) -> int | None:
    """Returns the optimizer step at which a learning rate ends to decay. None if it does not depend on the run's
    length."""
    train = section.removesuffix(".optimizer")
    if flat.get(f"{section}.schedule") in (None, Schedule.CONSTANT.value):
        return None
    # The policy does not train while the critic warms up.
    steps = flat["steps"] - (flat.get("algorithm.critic_warmup_steps", 0) if train == "train" else 0)
    return (
        flat[f"{section}.decay_steps"] or steps * flat[f"{train}.num_minibatches"] * flat[f"{train}.epochs_per_batch"]
    )


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)
