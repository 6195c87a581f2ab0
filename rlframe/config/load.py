"""Composition: YAML groups and overrides into plain values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlframe.config.overrides import rewritten
from rlframe.utils.errors import ConfigError


def configs_folder() -> Path:
    """Returns the folder of the YAML files: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def command_line(arguments: Sequence[str]) -> list[str]:
    """Returns `arguments` in Hydra's grammar; see `overrides.rewritten`."""
    groups = {path.name: path for path in configs_folder().iterdir() if path.is_dir()}
    files = {name: sorted(file.stem for file in folder.glob("*.yaml")) for name, folder in groups.items()}
    return rewritten(list(arguments), groups=files)


def composed(config_name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the values of `--config-name config_name` with `overrides`, as the command line would give them.

    Raises:
        ConfigError: no such config, group or key.
    """
    with initialize_config_dir(version_base="1.3", config_dir=str(configs_folder())):
        try:
            found = compose(config_name, overrides=command_line(overrides))
        except HydraException as error:
            raise ConfigError([str(error)]) from error
    return to_values(found, config_name=config_name)


def to_values(composed: DictConfig, *, config_name: str, output: str | None = None) -> dict[str, Any]:
    """Returns `composed` as a plain dict. `name` defaults to `config_name`, `output` to the argument or
    `outputs/<name>`.

    Raises:
        ConfigError: an interpolation that leads nowhere.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([str(error)]) from error
    assert isinstance(values, dict)
    name = values.get("name", config_name)
    return {"name": name, "output": output or f"outputs/{name}"} | {str(key): value for key, value in values.items()}
