"""From a name in the config to the class in the file of that name."""

import importlib
import re
from functools import cache
from pathlib import Path

from rlframe.utils.errors import ConfigError

EXTENSION = re.compile(r"^(COMPONENT, CONFIG|FAMILY|TRANSPORT|STREAM) = ", re.MULTILINE)


@cache
def names(package: str) -> list[str]:
    """The names a config may use for `package`, sorted: those of its files that are extensions.

    A file is an extension when it ends with `COMPONENT, CONFIG = TheClass, TheConfig`, or, in the folders of model
    families, of transports and of kinds of data, with `FAMILY = TheFamily()`, `TRANSPORT = TheTransport` and
    `STREAM = TheStream`. Files are read, not imported: an engine's may need what is not installed.
    """
    folders = importlib.import_module(package).__path__
    files = (file for folder in folders for file in Path(folder).glob("*.py"))
    return sorted(file.stem for file in files if EXTENSION.search(file.read_text(encoding="utf-8")))


def find(package: str, name: str, *, key: str) -> tuple[type, type]:
    """The pair `(COMPONENT, CONFIG)` that the file `package/name.py` ends with.

    Args:
        key: the dotted config key that chose `name`, for the error message.

    Raises:
        ConfigError: there is no such file in the package.
    """
    known = names(package)
    if name not in known:
        raise ConfigError([f"{key} must be one of {', '.join(known)}, got {name!r}"])
    module = importlib.import_module(f"{package}.{name}")
    return module.COMPONENT, module.CONFIG
