"""Classes and functions from outside the package: `path/to/file.py:Name` or `package.module:Name`.

The driver reads a file once. Workers on any node get its text and run it under the same module name before their first
call, so that unpickling finds its classes. Ray's `py_modules` would have to be passed to the cluster when the job
starts, and pickling by value would give each worker a second class of the same name. A module must be installed on
every machine with workers.
"""

import hashlib
import importlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args, get_type_hints

from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

logger = logging.getLogger(__name__)

SOURCES: dict[str, tuple[str, str]] = {}
"""The absolute path on the driver's machine and the text of each file, by its path in the configuration."""
RECEIVED: set[str] = set()
"""Paths of files that the driver has sent. What lies at the same path here is not looked at."""
_told: dict[str, str] = {}
"""Later text of a file of which a warning has told."""


def is_outside(name: str) -> bool:
    """Returns whether a name in the configuration refers to something outside the package."""
    return ":" in name


def load(target: str, *, key: str) -> Any:
    """Returns the object that `target` names.

    Raises:
        ConfigError: the text has the wrong form, the import fails, or the name does not exist.
    """
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        rule = "must be path/to/file.py:Name or package.module:Name"
        raise ConfigError([Fault(key, rule, got=repr(target))])
    try:
        module = module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # The user's file may raise anything.
        raise ConfigError(
            [Fault(key, said=f"{target!r} cannot be imported: {type(error).__name__}: {error}")]
        ) from error
    if not hasattr(module, name):
        raise ConfigError([Fault(key, said=f"{target!r}: {place} has no {name!r}")])
    return getattr(module, name)


def load_class(target: str, *, base: str | None, key: str) -> type:
    """Returns the class that `target` names.

    Args:
        base: `package.module:Class` that it must be derived from.

    Raises:
        ConfigError: as `load`; or the class has another base or lacks methods.
    """
    found, wanted = load(target, key=key), load(base, key=key) if base else object
    if not isinstance(found, type) or not issubclass(found, wanted):
        raise ConfigError([Fault(key, f"must name a class derived from {wanted.__qualname__}", got=repr(target))])
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError([Fault(key, f"must name a class that defines {', '.join(missing)}", got=repr(target))])
    return found


def settings_of(component: type, *, key: str) -> type:
    """Returns the dataclass of the component's settings: the annotation of `config` in its `__init__`, or the argument
    of its generic base, as in `PolicyGradient[MySettings]`.

    Raises:
        ConfigError: there is none.
    """
    stated = get_type_hints(component.__init__).get("config")
    of_bases = [
        argument
        for kind in component.__mro__
        for base in vars(kind).get("__orig_bases__", ())
        for argument in get_args(base)
    ]
    candidates = of_bases if stated is None or isinstance(stated, TypeVar) else [stated]
    for candidate in candidates:
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    rule = "must name a class with __init__(self, config: Settings), where Settings is a dataclass"
    raise ConfigError([Fault(key, rule, got=component.__qualname__)])


def receive(sources: Mapping[str, tuple[str, str]]) -> None:
    """Runs the driver's files in this process, so that unpickling finds their classes."""
    SOURCES.update(sources)
    RECEIVED.update(sources)
    for place in sources:
        module_of_file(place)


def module_of_file(place: str) -> ModuleType:
    """Returns the module of a file, which is run once. Raises OSError if there is none, or what the file raises."""
    if place not in RECEIVED:
        _look_at(place)
    path, text = SOURCES[place]
    name = f"rlframe_outside_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = path
    # Dataclasses and pickle look up their module there.
    sys.modules[name] = module
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name], SOURCES[place]
        raise
    return module


def _look_at(place: str) -> None:
    """Reads a file, unless it was read. A relative path may be another file's since: that of a later run in this
    process, from another folder.

    Raises:
        OSError: there is no such file, and never was.
    """
    file, known = Path(place).expanduser(), SOURCES.get(place)
    if known and not file.exists():
        return
    file = file.resolve(strict=True)
    text = file.read_text(encoding="utf-8")
    if known is None or known[0] != str(file):
        SOURCES[place] = (str(file), text)
    elif text not in (known[1], _told.get(place)):
        _told[place] = text
        logger.warning("%s has changed since it was read; this process keeps what it has: start a new one", file)
