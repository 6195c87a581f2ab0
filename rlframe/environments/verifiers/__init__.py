"""Environments of the package `verifiers`, in which the policy takes one seat.

`conversation` is what travels between the package and the policy, `seat` the package's side of it.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from rlframe.data.builtin.verifiers import FIELD
from rlframe.environments.base import Environment, Step, Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.utils.bounds import check_bounds
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

KEY = "environment.options"
CLOSE_TIMEOUT_S = 10.0
"""Seconds in which an episode that is ended must let go of what it holds."""


@dataclass(kw_only=True, slots=True)
class VerifiersConfig:
    """Settings of the environment. The task set is that of data.path=verifiers:ID."""

    id: str = ""
    """Id of an environment that is played with the task set. Empty means the task set's own, which without one is a
    single agent."""
    agent: str = ""
    """Name of the policy's seat. Empty means the only one that has no `client` of its own in `config`."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further settings of the environment, by the names of the package's EnvConfig: those of a seat are
    `{agent: {max_turns: 8}}`. A seat of another model has `model` and `client`."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Verifiers(Environment):
    """Plays one episode. The package's harness asks for completions, which the policy gives: its questions are this
    environment's messages. Rewards and metrics are those of the policy's trace, given with the last turn."""

    rewards: ClassVar[bool] = True

    @classmethod
    def faults(cls, config: VerifiersConfig, sessions: EnvironmentConfig) -> Iterator[Fault]:
        """Yields faults of settings that the data decides, or that cannot be."""
        for name in ("id", "taskset"):
            if name in config.config:
                hint = "use environment.options.id" if name == "id" else "use data.path=verifiers:ID?setting=value"
                yield Fault(f"{KEY}.config.{name}", "must not be given", got=config.config[name], hint=hint)

    @classmethod
    def prepare(cls, config: VerifiersConfig) -> None:
        """Imports the package, which takes seconds.

        Raises:
            ConfigError: it is not installed.
        """
        if find_spec("verifiers") is None or find_spec("verifiers.v1") is None:
            rule, hint = "needs the package verifiers", "pip install 'rlframe[verifiers]'"
            raise ConfigError([Fault("environment.name", rule, got="verifiers", hint=hint)])
        from rlframe.environments.verifiers import seat

        cls.play = staticmethod(seat.play)

    play: ClassVar[Any] = None

    def __init__(self, config: VerifiersConfig):
        self._config = config
        self._episode: asyncio.Task[Any] | None = None

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """Begins an episode. Returns the first request of its harness, and offers the tools that it offers.

        Raises:
            ValueError: the prompt is of other data.
        """
        from rlframe.environments.verifiers.conversation import Conversation

        task = task_of(prompt)
        self._talk = Conversation()
        self._episode = asyncio.create_task(self.play(self._config, task, self._talk))
        asked = await self._next()
        if asked is None:
            raise ValueError("the episode ended before the policy was asked anything")
        self.tools = asked.tools
        return asked.messages

    async def step(self, turn: Turn) -> Step:
        """Gives the response to the harness. Returns what it asks next, or the rewards."""
        self._talk.reply(turn)
        asked = await self._next()
        if asked is None:
            assert self._episode is not None
            reward, metrics = self._episode.result()
            return Step(done=True, reward=reward, metrics=metrics)
        if asked.tools != self.tools:
            raise ValueError("the harness changed the tools in the middle of the conversation, which rlframe cannot")
        return Step(messages=asked.messages)

    async def close(self) -> None:
        """Ends the episode, and what it holds."""
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            await asyncio.wait([self._episode], timeout=CLOSE_TIMEOUT_S)

    async def _next(self) -> Any:
        """Returns the next question, or None if the episode is over. Raises what ended the episode."""
        assert self._episode is not None
        question = asyncio.create_task(self._talk.questions.get())
        try:
            # environment.step_timeout_s is the limit.
            await asyncio.wait([question, self._episode], return_when=asyncio.FIRST_COMPLETED)
        finally:
            question.cancel()
        if question.done() and not question.cancelled():
            return question.result()
        self._episode.result()
        return None


def task_of(prompt: Prompt) -> Mapping[str, Any]:
    """Returns the task of a prompt. Raises ValueError if it is of other data."""
    task = prompt.fields.get(FIELD)
    if task is None:
        raise ValueError("the prompt is no task of verifiers; use data.path=verifiers:ID")
    return task


COMPONENT, CONFIG = Verifiers, VerifiersConfig
