"""Finds the class of a component in the file or folder with the component's name."""

import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path

from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.outside import is_outside, load_class, settings_of

EXTENSION = re.compile(r"^(COMPONENT, CONFIG|FAMILY|TRANSPORT|SOURCE|CHECK) = ", re.MULTILINE)

BASES = {
    "rlframe.algorithms": "rlframe.algorithms.base:Algorithm",
    "rlframe.environments": "rlframe.environments.base:Environment",
    "rlframe.environments.tools": "rlframe.environments.tools.base:Tool",
    "rlframe.rewards": "rlframe.rewards.base:Reward",
    "rlframe.rollout": "rlframe.rollout.base.engine:RolloutEngine",
    "rlframe.loops.self_test.checks": "rlframe.loops.self_test.finding:Check",
    "rlframe.models.families": "rlframe.models.families.base:Family",
    "rlframe.weight_sync.transports": "rlframe.weight_sync.transports.base:Transport",
}
"""Base classes of components from outside, by the package of their kind."""


@cache
def names(package: str) -> list[str]:
    """Returns the names that a config may use for `package`, sorted: those of its files that are extensions.

    A file is an extension if it ends with `COMPONENT, CONFIG = TheClass, TheConfig`, or, in the folders of model
    families, of transports, of kinds of data and of checks, with `FAMILY = TheFamily()`, `TRANSPORT = TheTransport`,
    `SOURCE = TheSource` and `CHECK = TheCheck`. A folder counts as its `__init__.py`. Files are read, not imported,
    because an engine may need packages that are not installed.
    """
    found = importlib.util.find_spec(package)
    assert found and found.submodule_search_locations, f"{package} is a folder"
    folders = found.submodule_search_locations
    patterns = ("[!_]*.py", "*/__init__.py")
    files = [file for folder in folders for pattern in patterns for file in Path(folder).glob(pattern)]
    return sorted(name_of(file) for file in files if EXTENSION.search(file.read_text(encoding="utf-8")))


def name_of(file: Path) -> str:
    """Returns the name of the module that `file` is."""
    return file.parent.name if file.stem == "__init__" else file.stem


def find(package: str, name: str, *, key: str) -> tuple[type, type]:
    """Returns the pair `(COMPONENT, CONFIG)` at the end of the file `package/name.py` or `package/name/__init__.py`.
    For `path/to/file.py:Class` or `package.module:Class` returns that class with the dataclass of its settings.

    Args:
        key: the dotted config key that chose `name`, for the error message.

    Raises:
        ConfigError: the file or the class does not exist.
    """
    if is_outside(name):
        component = load_class(name, base=BASES.get(package), key=key)
        return component, settings_of(component, key=key)
    known = names(package)
    if name not in known:
        raise ConfigError([_unknown(name, known, key=key, outside=package in BASES)])
    module = importlib.import_module(f"{package}.{name}")
    return module.COMPONENT, module.CONFIG


def _unknown(name: str, known: list[str], *, key: str, outside: bool) -> Fault:
    """Returns the fault of a name that is none of the package's.

    Args:
        outside: whether it may also be one from outside, as which a text with a dot or a slash is understood.
    """
    rule, hint = f"must be one of {', '.join(known)}", did_you_mean(name, known)
    if outside:
        rule += ", or path/to/file.py:NAME or package.module:NAME"
        file, _, last = name.partition(".py")
        module, _, final = name.replace("/", ".").rpartition(".")
        if last or name.endswith(".py"):
            hint = f"did you mean {file}.py:{last.strip('./') or 'NAME'}?"
        elif module:
            hint = f"did you mean {module}:{final}?"
    return Fault(key, rule, got=repr(name), hint=hint)
