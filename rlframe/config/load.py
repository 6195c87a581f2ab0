"""Composes YAML groups and overrides into a RunConfig."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlframe.config.overrides import rewritten
from rlframe.loops.run import RunConfig
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError

CHOICES = {"algorithm": "rlframe.algorithms", "rollout": "rlframe.rollout", "teacher.engine": "rlframe.rollout"}
"""Sections whose dataclass is that of the package's file `<section>.name`."""


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


def load(config_name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the RunConfig of `--config-name config_name` with `overrides`, as the command line would give it.

    Raises:
        ConfigError: no such config, group or key, or values that no dataclass accepts.
    """
    with initialize_config_dir(version_base="1.3", config_dir=str(configs_folder())):
        try:
            composed = compose(config_name, overrides=command_line(overrides))
        except HydraException as error:
            raise ConfigError([str(error)]) from error
    return to_run(to_values(composed, config_name=config_name))


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


def to_run(values: Mapping[str, Any]) -> RunConfig:
    """Returns the RunConfig in a plain dict.

    Raises:
        ConfigError: every key and value that no dataclass accepts.
    """
    return build(RunConfig, inherited(values), choices=CHOICES)


def inherited(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `values`, where `critic.train` inherits missing entries from `train` if the section exists."""
    critic = values.get("critic")
    if not isinstance(critic, Mapping) or not isinstance(critic.get("train"), Mapping):
        return values
    return {**values, "critic": {**critic, "train": merged(values.get("train"), critic["train"])}}


def merged(base: Any, over: Any) -> Any:
    """Returns `over`, completed from `base`. A layout is taken as a whole, because parts of two layouts do not fit
    together."""
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    shared = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if key != "parallel"}
    return {**base, **over, **shared}
