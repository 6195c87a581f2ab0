"""Builds a RunConfig from plain values, or from the name of a configuration."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.config.load import composed
from rlframe.run.choices import CHOICES
from rlframe.run.config import RunConfig
from rlframe.utils.build import build


def load(config_name: str, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> RunConfig:
    """Returns the RunConfig of `--config-name config_name` with `overrides`, as the command line would give it.

    Args:
        config_dir: a folder of the user's own YAML files, as after `--config-dir`.

    Raises:
        ConfigError: no such config, group or key, or values that no dataclass accepts.
    """
    return to_run(composed(config_name, overrides, config_dir=config_dir))


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments of a tool that looks at a run: the same as those of `rlframe.main`."""
    parser.add_argument("--config-name", required=True, help="as for rlframe.main")
    parser.add_argument("--config-dir", help="a folder of your own YAML files, as for rlframe.main")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rlframe.main")


def of_arguments(options: Namespace) -> RunConfig:
    """Returns the RunConfig of the parsed arguments of `add_arguments`, which must be parsed with
    `parse_intermixed_args`.

    Raises:
        ConfigError: as `load`.
    """
    return load(options.config_name, options.overrides, config_dir=options.config_dir)


def to_run(values: Mapping[str, Any]) -> RunConfig:
    """Returns the RunConfig in a plain dict.

    Raises:
        ConfigError: every key and value that no dataclass accepts.
    """
    return build(RunConfig, inherited(values), choices=CHOICES)


def inherited(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `values`, where `critic.train` inherits missing entries from `train` if the section exists. Parts of the
    reward that are null are left out: so a file leaves out one that it inherits."""
    reward = values.get("reward")
    if isinstance(reward, Mapping) and isinstance(parts := reward.get("parts"), Mapping):
        kept = {name: part for name, part in parts.items() if part is not None}
        values = {**values, "reward": {**reward, "parts": kept}}
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
