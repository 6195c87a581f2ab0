"""A reward function of the user's own, by file or by module."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import RewardError, SettingError


@dataclass(kw_only=True, slots=True)
class PythonConfig:
    """Which function. `name: path/to/file.py:function` of a reward part is short for this."""

    function: str
    """`path/to/file.py:function` or `package.module:function`."""

    def __post_init__(self) -> None:
        module, _, name = self.function.rpartition(":")
        if not module or not name.isidentifier():
            raise SettingError(
                "function", "must be path/to/file.py:function or package.module:function", got=repr(self.function)
            )


class PythonFunction(Reward):
    """Returns what `function(response, answer, **fields)` does: a number, a truth value, or None where it has no say.

    `fields` are those of the prompt's record, less the ones named like its first two parameters; a function without
    `**` gets those that its other parameters name.
    """

    def __init__(self, config: PythonConfig):
        """Imports the function.

        Raises:
            RewardError: the import fails, or there is no such function.
        """
        self._function = _load(config.function)
        parameters = inspect.signature(self._function).parameters
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = list(parameters)

    def score(self, attempt: Attempt) -> float | None:
        """Returns the function's own result; the worker checks that it is a finite number or None."""
        fields = {
            name: value
            for name, value in attempt.fields.items()
            if name not in self._names[:2] and (self._takes_all or name in self._names)
        }
        return self._function(attempt.response_text, attempt.answer, **fields)


def _load(target: str) -> Callable[..., float | None]:
    module_name, _, function_name = target.rpartition(":")
    try:
        module = _import_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:  # the user's file may raise anything
        raise RewardError(f"reward {target!r} cannot be imported: {type(error).__name__}: {error}") from error
    function: Any = getattr(module, function_name, None)
    if function is None:
        raise RewardError(f"reward {target!r}: {module_name} has no {function_name!r}")
    if not isinstance(function, Callable):
        raise RewardError(f"reward {target!r}: {function_name!r} must be a function, got {type(function).__name__}")
    return function


def _import_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve(strict=True)
    spec = importlib.util.spec_from_file_location(f"rlframe_user_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


COMPONENT, CONFIG = PythonFunction, PythonConfig
