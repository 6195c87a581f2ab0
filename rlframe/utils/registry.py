"""From a name in the config to the class in the file, or folder, of that name."""

import importlib
import re
from functools import cache
from pathlib import Path

from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

EXTENSION = re.compile(r"^(COMPONENT, CONFIG|FAMILY|TRANSPORT|STREAM) = ", re.MULTILINE)


@cache
def names(package: str) -> list[str]:
    """Returns the names that a config may use for `package`, sorted: those of its files that are extensions.

    A file is an extension when it ends with `COMPONENT, CONFIG = TheClass, TheConfig`, or, in the folders of model
    families, of transports and of kinds of data, with `FAMILY = TheFamily()`, `TRANSPORT = TheTransport` and
    `STREAM = TheStream`. A folder counts as its `__init__.py`. Files are read, not imported: an engine's may need what
    is not installed.
    """
    folders = importlib.import_module(package).__path__
    files = [file for folder in folders for pattern in ("*.py", "*/__init__.py") for file in Path(folder).glob(pattern)]
    return sorted(name_of(file) for file in files if EXTENSION.search(file.read_text(encoding="utf-8")))


def name_of(file: Path) -> str:
    """Returns the name of the module that `file` is."""
    return file.parent.name if file.stem == "__init__" else file.stem


def find(package: str, name: str, *, key: str) -> tuple[type, type]:
    """Returns the pair `(COMPONENT, CONFIG)` that the file `package/name.py`, or `package/name/__init__.py`, ends with.

    Args:
        key: the dotted config key that chose `name`, for the error message.

    Raises:
        ConfigError: there is no such file in the package.
    """
    known = names(package)
    if name not in known:
        raise ConfigError([Fault(key, f"must be one of {', '.join(known)}", got=repr(name))])
    module = importlib.import_module(f"{package}.{name}")
    return module.COMPONENT, module.CONFIG
