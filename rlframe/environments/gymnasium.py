"""Environments of the package `gymnasium`, and others with its `reset` and `step`."""

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np

from rlframe.environments.base import in_thread, number
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.stepping import InvalidAction, Outcome, Stepping, SteppingConfig
from rlframe.types.prompt import Prompt
from rlframe.utils import outside
from rlframe.utils.bounds import PathText, check_bounds
from rlframe.utils.errors import ConfigError, SettingError
from rlframe.utils.faults import Fault

KEY = "environment.options"
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class GymnasiumConfig(SteppingConfig):
    """Settings of the environment, of its observations and of its actions. {render} in `observation` is what its
    `render()` returns."""

    id: Annotated[str, PathText()]
    """Registered id such as FrozenLake-v1, or module:ID where importing the module registers it. Otherwise a class or
    function that makes one: path/to/file.py:Name or package.module:Name."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of gymnasium.make, or of the class or function."""
    actions: dict[str, Any] = field(default_factory=dict)
    """Actions by their names in the policy's text, without regard to case. Empty means the text itself where the action
    space is of texts, otherwise its JSON, such as 2 or [0.5, 1]."""
    options_field: str = ""
    """Field of the record that is given to `reset` as its options. Empty gives none."""
    metrics: list[str] = field(default_factory=list)
    """Names of numbers in `info` that are logged."""

    def __post_init__(self) -> None:
        SteppingConfig.__post_init__(self)
        check_bounds(self)
        if not self.id:
            raise SettingError("id", "must name an environment", got="''")


class Gymnasium(Stepping):
    """Plays one episode of an environment, in a thread of its own. The seed of `reset` is that of the prompt in its
    step, so that all attempts of a group begin alike."""

    deterministic: ClassVar[bool] = True

    @classmethod
    def faults(cls, config: GymnasiumConfig, sessions: EnvironmentConfig) -> Iterator[Fault]:
        """Reads the file of a class, so that it travels to the sessions. Yields nothing: `prepare` tells of faults."""
        if ".py:" in config.id:
            with suppress(ConfigError):
                maker(config)
        yield from ()

    @classmethod
    def prepare(cls, config: GymnasiumConfig) -> None:
        """Finds what makes the environment.

        Raises:
            ConfigError: there is no such environment.
        """
        cls.make = staticmethod(maker(config))

    make: ClassVar[Any] = None

    def __init__(self, config: GymnasiumConfig):
        Stepping.__init__(self, config)
        self._config = config
        self._names = {name.casefold(): action for name, action in config.actions.items()}
        self._thread = ThreadPoolExecutor(1)
        self._env: Any = None

    async def begin(self, prompt: Prompt, *, seed: int) -> Outcome:
        """Makes and resets the environment."""
        options = prompt.fields.get(self._config.options_field) if self._config.options_field else None
        self._env = await self._do(self.make)
        observation, info = await self._do(partial(self._env.reset, seed=seed % 2**31, options=options))
        return Outcome(values=await self._do(partial(self._values, observation, info)))

    async def act(self, text: str) -> Outcome:
        """Takes an action."""
        action = self.action_of(text)
        observation, reward, terminated, truncated, info = await self._do(partial(self._env.step, action))
        done = bool(terminated or truncated)
        metrics = {name: number(f"info[{name!r}]", info[name]) for name in self._config.metrics if name in info}
        return Outcome(
            values={} if done else await self._do(partial(self._values, observation, info)),
            reward=float(reward),
            done=done,
            metrics={**metrics, "terminated": float(bool(terminated)), "truncated": float(bool(truncated))},
        )

    def action_of(self, text: str) -> Any:
        """Returns the action that a text names. Raises InvalidAction if it names none."""
        space = getattr(self._env, "action_space", None)
        if self._names:
            if text.casefold() not in self._names:
                raise InvalidAction(f"{text!r:.80} is none of {', '.join(self._config.actions)}")
            value = self._names[text.casefold()]
        elif space is None or type(space).__name__ == "Text":
            value = text
        else:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                raise InvalidAction(f"{text!r:.80} is no action of {space}") from None
        if space is None or isinstance(value, str):
            action = value
        else:
            try:
                action = from_json(space, value)
            except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
                raise InvalidAction(f"{text!r:.80} is no action of {space}") from None
        if space is not None and not space.contains(action):
            raise InvalidAction(f"{text!r:.80} is no action of {space}")
        return action

    async def close(self) -> None:
        """Closes the environment."""
        if self._env is not None:
            await self._do(self._env.close)
        self._thread.shutdown(wait=False)

    def _values(self, observation: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of the names in the text of an observation."""
        forms = (self._config.observation, self._config.first_observation or "")
        own = dict(observation) if isinstance(observation, Mapping) else {}
        shown = {"render": self._env.render()} if any("{render" in form for form in forms) else {}
        return {**own, "observation": observation, "info": info, **shown}

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, in_thread, work)


def from_json(space: Any, value: Any) -> Any:
    """Returns the action that a JSON value is in a space.

    The package reads whole numbers without their fractions, and batches of composed actions only.

    Raises:
        TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError: it is none.
    """
    kind = type(space).__name__
    if kind == "Dict":
        if set(value) != set(space.spaces):
            raise ValueError(f"it must have {', '.join(space.spaces)}")
        return {name: from_json(inner, value[name]) for name, inner in space.spaces.items()}
    if kind == "Tuple":
        return tuple(from_json(inner, each) for inner, each in zip(space.spaces, value, strict=True))
    action = space.from_jsonable([value])[0]
    if np.asarray(action).dtype.kind in "iu" and not np.array_equal(action, value):
        raise ValueError("it must be of whole numbers")
    return action


def maker(config: GymnasiumConfig) -> Callable[[], Any]:
    """Returns the function that makes the environment.

    Raises:
        ConfigError: the package, the environment or the class is not there.
    """
    place, _, name = config.id.rpartition(":")
    if place and name.isidentifier():
        made = outside.load(config.id, key=f"{KEY}.id")
        if not callable(made):
            raise ConfigError([Fault(f"{KEY}.id", "must name a class or a function", got=repr(config.id))])
        return partial(made, **config.arguments)
    if find_spec("gymnasium") is None:
        why, hint = "it makes registered environments", "pip install 'rlframe[agents]'"
        raise ConfigError([Fault(f"{KEY}.id", "needs the package gymnasium", got=repr(config.id), why=why, hint=hint)])
    # By its name, because this module has the same one.
    gymnasium: Any = importlib.import_module("gymnasium")
    try:
        if place:
            importlib.import_module(place)
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError([Fault(f"{KEY}.id", said=f"gymnasium has no {config.id!r:.80}: {error}")]) from error
    return partial(gymnasium.make, config.id, **config.arguments)


COMPONENT, CONFIG = Gymnasium, GymnasiumConfig
