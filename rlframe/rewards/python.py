"""A user's reward, a function or a class, from a file or a module."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlframe.rewards.base import Attempt, Reward, Scores
from rlframe.rewards.config import Per
from rlframe.utils import outside
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError, RewardError, SettingError


@dataclass(kw_only=True, slots=True)
class PythonConfig:
    """Settings that select the function. `name: path/to/file.py:function` of a reward part is a shorthand for it."""

    function: str
    """`path/to/file.py:function` or `package.module:function`, or a class derived from rlframe.rewards.base.Reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of such a class."""

    def __post_init__(self) -> None:
        module, _, name = self.function.rpartition(":")
        if not module or not name.isidentifier():
            must = "must be path/to/file.py:function or package.module:function"
            raise SettingError("function", must, got=repr(self.function))


ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
FOREIGN = ("completions", "solution_str", "ground_truth")
"""Names of parameters by which rewards of TRL and verl are known."""


class PythonFunction(Reward):
    """Returns the result of `function(response, answer, **fields)`: a number, a truth value, or None if it does not
    apply.

    `fields` are those of the prompt's record, except ones named like the first two parameters. A function without `**`
    gets the fields named by its other parameters. With per=group it gets the list of the responses, and returns a list.
    Of a class derived from Reward, `score` or `score_group` is called.
    """

    per = frozenset(Per)

    def __init__(self, config: PythonConfig):
        """Imports the function, or imports the class and creates it with its options.

        Raises:
            RewardError: the import fails, the function does not exist, or the class has no such options.
        """
        found: Any = _load(config.function)
        is_class = isinstance(found, type)
        self._reward: Reward | None = _made(found, config) if is_class else None
        if self._reward:
            return
        if config.options:
            raise RewardError(f"reward {config.function!r} is a function, which has no options, got {config.options}")
        self._function: Callable[..., Any] = found
        parameters = inspect.signature(self._function).parameters
        _refuse_signature(config.function, self._function, list(parameters.values()))
        further = [each for each in list(parameters.values())[2:] if each.kind not in ANY_NUMBER]
        self.required_fields = frozenset(each.name for each in further if each.default is each.empty)
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = list(parameters)

    def scores(self, per: Per) -> bool:
        """Returns whether the user's class has the method. A function can be given either."""
        return self._reward.scores(per) if self._reward else True

    def score(self, attempt: Attempt) -> Scores:
        """Returns the function's result. The worker checks that it is a finite number or None, or one for each turn."""
        return self._reward.score(attempt) if self._reward else self._called(attempt, attempt.response_text)

    def score_group(self, attempts: Sequence[Attempt]) -> Sequence[Scores]:
        """Returns the function's result, which the worker checks. The fields are those of the prompt."""
        if self._reward:
            return self._reward.score_group(attempts)
        return self._called(attempts[0], [attempt.response_text for attempt in attempts])

    @property
    def extracts(self) -> bool:
        """Returns whether the user's class has `extract`, which a function has not."""
        return self._reward is not None and self._reward.extracts

    def extract(self, attempt: Attempt) -> str | None:
        """Returns the answer that the user's class reads."""
        assert self._reward is not None
        return self._reward.extract(attempt)

    def _called(self, attempt: Attempt, response: Any) -> Any:
        fields = {
            name: value
            for name, value in attempt.fields.items()
            if name not in self._names[:2] and (self._takes_all or name in self._names)
        }
        return self._function(response, attempt.answer, **fields)


def _refuse_signature(name: str, function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> None:
    """Raises RewardError for a function that cannot be called as rewards are."""
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward {name!r} must be a plain function, without async: nothing awaits it")
    places = [each.name for each in parameters if each.kind in POSITIONAL]
    any_number = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    # In the place of the answer there would be a response.
    mistaken = places[1:2] in (["completions"], ["solution_str"])
    if mistaken or (len(places) < 2 and not any_number):
        shown = ", ".join(str(each) for each in parameters)
        others = [each for each in FOREIGN if each in places]
        hint = f"; {others[0]!r} is a name of TRL or verl, whose rewards are called otherwise" if others else ""
        raise RewardError(f"reward {name!r}: rlframe calls f(response, answer, **fields), got f({shown}){hint}")


def _made(kind: type, config: PythonConfig) -> Reward:
    """Returns the reward that a user's class makes of its options."""
    if not issubclass(kind, Reward):
        raise RewardError(
            f"reward {config.function!r}: the class {kind.__name__} must be derived from Reward (from "
            "rlframe.rewards.base import Reward); a function needs no class"
        )
    if missing := sorted(kind.__abstractmethods__):
        raise RewardError(
            f"reward {config.function!r}: the class {kind.__name__} must define {', '.join(missing)}; add "
            "`def __init__(self, config: Settings)`, where Settings is a dataclass"
        )
    try:
        return kind(build(outside.settings_of(kind, key="name"), config.options, key="options"))
    except ConfigError as error:
        raise RewardError(f"reward {config.function!r}: {'; '.join(map(str, error.faults))}") from error


def _load(target: str) -> Callable[..., float | None]:
    try:
        found = outside.load(target, key="")
    except ConfigError as error:
        raise RewardError(f"reward {'; '.join(map(str, error.faults))}") from error
    if not isinstance(found, Callable):
        _, _, name = target.rpartition(":")
        raise RewardError(f"reward {target!r}: {name!r} must be a function, got {type(found).__name__}")
    return found


COMPONENT, CONFIG = PythonFunction, PythonConfig
