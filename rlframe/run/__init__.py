"""One run: its configuration, the checks of it, and the composition of its parts.

The package has the name of the function that users call, `rlframe.run(config)`, and is therefore callable.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package, which is `rlframe.run.library.run` when it is called."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[str, float]:
        return importlib.import_module("rlframe.run.library").run(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
