"""Composition: YAML groups and overrides into plain values."""

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlframe.config.entries import SECTIONS, WHOLE, deletions
from rlframe.config.overrides import overrides_last, rewritten
from rlframe.config.searched import lent, searched
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

logger = logging.getLogger(__name__)

REFUSALS = (HydraException, OmegaConfBaseException, YAMLError)
"""Errors of Hydra for files and arguments that a user can mend."""
GLOBAL = re.compile(r"^\s*#\s*@package\s+_global_\s*$", re.MULTILINE)
"""Line of a file whose settings Hydra does not put below the name of its folder."""
UNCHOSEN = re.compile(
    r"Could not (?:delete|override) '(?P<group>\w+)'\. No match in the defaults list\.?"
    r"(?:\n.* use (?P<choice>\+\S+))?$"
)
"""Refusal by Hydra of `~reward` and `reward=math` where the defaults have no line `reward`."""


def configs_folder() -> Path:
    """Returns the folder of the YAML files: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def command_line(arguments: Sequence[str], *, default_name: str) -> list[str]:
    """Returns `arguments` of the program in Hydra's grammar; see `overrides.rewritten` and `entries`.

    Args:
        default_name: name of the configuration without `--config-name`.

    Raises:
        ConfigError: an argument that Hydra would refuse, or a configuration, group or choice that does not exist, with
            the nearest name.
    """
    arguments = overrides_last([_at_home(word) for word in arguments])
    extra = option(arguments, "--config-dir", "-cd")
    name = option(arguments, "--config-name", "-cn")
    folders = config_folders(extra)
    written = rewritten(list(arguments), groups=choices(folders))
    if option(arguments, "--config-path", "-cp") is not None:
        # A folder in the place of the package's: only Hydra knows what is in it.
        return written
    if name is not None:
        _check_name(name, folders)
    _check_places(name or default_name, arguments, folders)
    return _with_replaced(name or default_name, arguments, written, folders)


def _at_home(word: str) -> str:
    """Returns `--config-dir=~/folder` with the folder's whole path, which shells leave as it is, and Hydra too."""
    name, equals, value = word.partition("=")
    return f"{name}={Path(value).expanduser()}" if equals and name in ("--config-dir", "-cd") else word


def option(arguments: Sequence[str], *names: str) -> str | None:
    """Returns the value of an option of the program, given as `--name value` or `--name=value`. None without it."""
    for argument, after in zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else after
    return None


def config_folders(extra: str | None) -> list[Path]:
    """Returns the folders with YAML files, the first of which has precedence.

    Args:
        extra: the user's own, of `--config-dir`.

    Raises:
        ConfigError: there is no such folder.
    """
    if extra is None:
        return [configs_folder()]
    own = Path(extra).expanduser()
    if not own.is_dir():
        raise ConfigError([Fault("--config-dir", "must be a folder", got=str(own.absolute()))])
    return [own.resolve(), configs_folder()]


def config_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names that `--config-name` may have, sorted."""
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml") if file.stem != "base"})


def choices(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Returns the names of the files of each group, sorted."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for group in folder.iterdir():
            if group.is_dir() and not group.name.startswith((".", "_")):
                found.setdefault(group.name, set()).update(file.stem for file in group.glob("*.yaml"))
    return {group: sorted(names) for group, names in sorted(found.items())}


def _check_name(name: str, folders: Sequence[Path]) -> None:
    stem = name.removesuffix(".yaml")
    # Hydra looks for no absolute path, and takes the defaults of a file beside `..` from its own folder.
    a_path = Path(name).is_absolute() or bool({".", ".."} & set(name.split("/")))
    files = [folder / f"{stem}.yaml" for folder in folders if not a_path and (folder / f"{stem}.yaml").is_file()]
    if files and "/" in stem and not GLOBAL.search(files[0].read_text(encoding="utf-8", errors="replace")):
        rule = "must name a file that has the line `# @package _global_` if it lies in a folder"
        why = f"Hydra puts what is in it below {stem.rpartition('/')[0].replace('/', '.')}"
        raise ConfigError([Fault("--config-name", rule, got=repr(name), why=why, hint=f"begin {files[0]} with it")])
    if files:
        return
    known = config_names(folders)
    where = " or ".join(map(str, folders))
    rule = f"must name a file of {where}: {', '.join(known)}"
    hint = did_you_mean(stem, known)
    if (file := Path(f"{stem}.yaml")).is_file():
        hint = f"write --config-dir {file.parent} --config-name {file.stem}"
    raise ConfigError([Fault("--config-name", rule, got=repr(name), hint=hint)])


def composed(config_name: str, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> dict[str, Any]:
    """Returns the values of `--config-name config_name` with `overrides`, as the command line would give them.

    Args:
        config_dir: a folder of the user's own YAML files, as after `--config-dir`.

    Raises:
        ConfigError: no such config, group or key.
    """
    folders = config_folders(config_dir)
    _check_name(config_name, folders)
    written = rewritten(list(overrides), groups=choices(folders))
    _check_places(config_name, overrides, folders)
    found = _compose(config_name, _with_replaced(config_name, overrides, written, folders), folders)
    return to_values(found, config_name=config_name)


def _compose(config_name: str, overrides: list[str], folders: Sequence[Path]) -> DictConfig:
    with lent(), searched(folders), initialize_config_dir(version_base="1.3", config_dir=str(configs_folder())):
        try:
            return compose(config_name, overrides=overrides)
        except (*REFUSALS, RecursionError) as error:
            raise refusal(error) from error


def _with_replaced(
    config_name: str, arguments: Sequence[str], written: list[str], folders: Sequence[Path]
) -> list[str]:
    """Returns `written` with overrides that remove what the files name and the command line replaces, and logs them."""
    for section in SECTIONS:
        if not any(argument.startswith(section) for argument in arguments):
            continue
        there = OmegaConf.select(_of_files(config_name, arguments, folders), section)
        gone = deletions(section, arguments, there or {})
        if gone:
            names = ", ".join(each.removeprefix(f"~{section}.") for each in gone)
            logger.info("%s of the command line replaces %s; +%s.NAME would add to it", section, names, section)
        # Beside the first of the section, because Hydra takes overrides in one row only, between its options.
        place = next(index for index, word in enumerate(written) if word.lstrip("+~").startswith(section))
        written = [*written[:place], *gone, *written[place:]]
    return list(_with_other_kinds(config_name, arguments, written, folders))


def _with_other_kinds(
    config_name: str, arguments: Sequence[str], written: list[str], folders: Sequence[Path]
) -> Iterator[str]:
    """Yields `written`, with a removal before each list in the place of a mapping of the files, or the other way round,
    and before each mapping that is one value, which Hydra does not replace: data.path may be any of these."""
    kinds = {"[": (DictConfig,), "{": (ListConfig,)}
    given = {word.lstrip("+").partition("=")[0]: kinds.get(word.partition("=")[2][:1]) for word in arguments}
    given |= {word.partition("=")[0]: (DictConfig, ListConfig) for word in arguments if word.startswith(WHOLE)}
    removed = {word.removeprefix("~") for word in arguments if word.startswith("~")}
    others = {
        key: kind
        for key, kind in given.items()
        if kind and "." in key and key not in removed and not key.startswith(("hydra.", "-"))
    }
    if not others:
        yield from written
        return
    there = _of_files(config_name, arguments, folders)
    for word in written:
        key = word.lstrip("+").partition("=")[0]
        if key in others and isinstance(OmegaConf.select(there, key, throw_on_resolution_failure=False), others[key]):
            yield f"~{key}"
        yield word


def _check_places(config_name: str, arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Raises a ConfigError for arguments inside of a list of the files that name none of its items, on which Hydra
    breaks."""
    keys = {word: word.lstrip("+~").partition("=")[0] for word in arguments if not word.startswith("-")}
    # No list lies nearer to the root than in a section.
    inside = {word: key for word, key in keys.items() if key.count(".") > 1 and not key.startswith("hydra.")}
    if not inside:
        return
    there, faults = _of_files(config_name, arguments, folders), []
    for word, key in inside.items():
        parts = key.split(".")
        for count in range(2, len(parts)):
            whole, place = ".".join(parts[:count]), parts[count]
            items = OmegaConf.select(there, whole, throw_on_resolution_failure=False)
            if whole in keys.values() or not isinstance(items, ListConfig):
                continue
            if word.startswith("~") or not place.isdecimal() or int(place) >= len(items):
                rule = f"must be the place of an item of {whole}, which the files give as a list of {len(items)}"
                faults.append(Fault(key, rule, got=word, hint=f"write the whole list as {whole}=[...]"))
            break
    if faults:
        raise ConfigError(faults)


def _of_files(config_name: str, arguments: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """Returns the values of the files alone, of the groups that `arguments` choose."""
    groups = choices(folders)
    chosen = [word for word in arguments if word.partition("=")[0] in groups and "," not in word]
    return _compose(config_name, chosen, folders)


def refusal(error: Exception) -> ConfigError:
    """Returns what Hydra refuses, as a fault of the configuration."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, RecursionError):
        # Hydra follows defaults without looking where it has been.
        rule = "must not lead back to the file that has them"
        why = "of two files of one name that in --config-dir is taken, for its own defaults too"
        return ConfigError([Fault("defaults", rule, why=why, hint="give your file a name of its own")])
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        rule = f"must name a file of configs/{group}: {', '.join(error.options)}"
        return ConfigError([Fault(group, rule, got=repr(name), hint=did_you_mean(name, error.options))])
    if unchosen := UNCHOSEN.match(str(error)):
        group, choice = unchosen["group"], unchosen["choice"]
        rule = f"does not fit, because the recipe's defaults choose no file of configs/{group}"
        hint = f"write {choice}" if choice else f"write ~{group}.{'parts' if group == 'reward' else 'KEY'}"
        return ConfigError([Fault(choice.lstrip("+") if choice else f"~{group}", rule, hint=hint)])
    return ConfigError([str(error)])


def to_values(composed: DictConfig, *, config_name: str) -> dict[str, Any]:
    """Returns `composed` as a plain dict. `name` defaults to `config_name`, `output` to `outputs/<name>`.

    Raises:
        ConfigError: an interpolation that leads nowhere.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        # Its text begins with a sentence, or with one round that of a resolver such as `oc.env`.
        said = str(error).partition("\n")[0].rpartition("resolving interpolation: ")[2].strip('"')
        raise ConfigError([Fault(error.full_key or "", said=said)]) from error
    assert isinstance(values, dict)
    name = values.get("name", config_name.removesuffix(".yaml"))
    return {"name": name, "output": f"outputs/{name}"} | {str(key): value for key, value in values.items()}
