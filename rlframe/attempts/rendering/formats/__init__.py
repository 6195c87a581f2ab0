"""Forms of tool calls, one file each. A file ends `FORMAT = TheFormat`; its name is the setting's value."""

import importlib
import pkgutil
from typing import Any


def names() -> list[str]:
    """Returns the names of all forms."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def find_format(name: str) -> Any:
    """Returns the class of the form `name`, a `Format`."""
    return importlib.import_module(f"{__name__}.{name}").FORMAT
