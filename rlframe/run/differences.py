"""The difference between a configuration and its recipe, for runs that no command line describes."""

import json
from typing import Any

from rlframe.config.load import config_folders, config_names
from rlframe.run.check.effect import changed
from rlframe.run.config import RunConfig
from rlframe.run.load import load
from rlframe.utils.build import as_dict
from rlframe.utils.errors import ConfigError
from rlframe.utils.nested import flat
from rlframe.utils.secrets import without_secrets

ABSENT = object()


def differences(run: RunConfig) -> list[str]:
    """Returns `key=value` for each setting that differs from that of the shipped recipe with the run's name, and `~key`
    for each that only the recipe has. Without such a recipe the settings are compared with their defaults."""
    recipe = recipe_of(run)
    sections = [key for key, _ in changed(run, recipe)]
    here, there = settings_of(run), settings_of(recipe) if recipe else {}

    def differs(key: str) -> bool:
        within = any(key == section or key.startswith(f"{section}.") for section in sections)
        return within and here.get(key, ABSENT) != there.get(key, ABSENT)

    own = [f"{key}={_written(value)}" for key, value in here.items() if differs(key)]
    return own + [f"~{key}" for key in there if key not in here and differs(key)]


def recipe_of(run: RunConfig) -> RunConfig | None:
    """Returns the shipped recipe with the run's name. None if there is none."""
    if run.name not in config_names(config_folders(None)):
        return None
    try:
        return load(run.name)
    except ConfigError:
        # It does not stand alone: some of its keys are the user's to give.
        return None


def settings_of(run: RunConfig) -> dict[str, Any]:
    """Returns the settings by dotted key, without secrets."""
    return flat(without_secrets(as_dict(run)))


def _written(value: Any) -> str:
    """Returns a value as the command line writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
