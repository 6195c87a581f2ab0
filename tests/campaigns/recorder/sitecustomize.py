"""Notes in every process of a run which settings rlframe reads, for `tests.campaigns.without_effect`.

Python imports a module of this name when it starts, in Ray's workers too, if its folder is on PYTHONPATH. It makes the
configuration's dataclasses tell who reads them, as they are made.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("RLFRAME_READ_SETTINGS")
CHECKERS = ("rlframe/config/", "rlframe/run/check/", "rlframe/run/folder.py", "rlframe/run/load.py", "utils/bounds.py")
CHECKING = tuple(place.replace("/", os.sep) for place in CHECKERS)
"""Code that reads settings to judge them, not to follow them."""
_make = dataclasses.dataclass


def recording(cls: Any = None, **options: Any) -> Any:
    """As `dataclasses.dataclass`; a configuration's class notes who reads its fields."""
    made = _make(cls, **options)
    if cls is None:
        return lambda later: watched(made(later))
    return watched(made)


def watched(cls: type) -> type:
    """The class, noting its fields' names in a file of this process the first time that each is read."""
    if not (cls.__module__.startswith("rlframe.") and cls.__name__.endswith(("Config", "Term"))):
        return cls
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    read: set[str] = set()

    def getattribute(self: Any, name: str) -> Any:
        if name in names and type(self) is cls and name not in read and follows(sys._getframe(1)):
            read.add(name)
            with (Path(str(FOLDER)) / f"{os.getpid()}").open("a") as file:
                file.write(f"{cls.__name__}.{name}\n")
        return object.__getattribute__(self, name)

    cls.__getattribute__ = getattribute  # type: ignore[method-assign]
    return cls


def follows(frame: Any) -> bool:
    """Whether rlframe reads here, and not to check, compare, copy or print."""
    if "rlframe" not in frame.f_code.co_filename:
        return False
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "__post_init__" or any(part in file for part in CHECKING):
            return False
        frame = frame.f_back
    return True


if FOLDER:
    dataclasses.dataclass = recording
