"""Base of environments whose own interface is `reset` and `step`: observations become messages, text an action."""

import re
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from rlframe.environments.base import Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class SteppingConfig:
    """Settings of observations and actions as text."""

    observation: str = "{observation}"
    """The user's message that the policy sees after each action: {observation}, and {NAME} of an observation that is a
    mapping."""
    first_observation: str | None = None
    """The same for the beginning, which follows the prompt's last message. null means `observation`."""
    action: str = r"(?s).*"
    """Regular expression for the action in the policy's text: its last match, or group 1 of that. Spaces around it do
    not count."""
    invalid: str = "Error: {error}"
    """The user's message after a text that is no action. The environment does not see that text."""
    invalid_reward: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Reward of a turn that is no action."""
    max_invalid: Annotated[int, Range(0, 100_000)] = 3
    """Greatest number of turns of an attempt that may be no action. The next one ends the attempt."""

    def __post_init__(self) -> None:
        check_bounds(self)
        try:
            re.compile(self.action)
        except re.error as error:
            why = str(error)
            raise SettingError("action", "must be a regular expression", got=repr(self.action), why=why) from None
        for name in ("observation", "first_observation", "invalid"):
            try:
                filled(getattr(self, name) or "", AnyName())
            except (ValueError, IndexError, AttributeError, TypeError) as error:
                got, why = repr(getattr(self, name)), str(error)
                raise SettingError(name, "must be a text with {names}", got=got, why=why) from None


class InvalidAction(Exception):
    """Raised if a text is no action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The answer of an environment to an action."""

    values: Mapping[str, Any]
    """Values of the names in `observation`."""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class AnyName(dict[str, Any]):
    """A mapping with every name, to check texts with names."""

    def __missing__(self, key: str) -> Any:
        return self

    def __format__(self, spec: str) -> str:
        return ""


class Stepping(Environment):
    """Base of environments that take an action and give an observation and a reward."""

    rewards: ClassVar[bool] = True

    def __init__(self, config: Any):
        self._form: SteppingConfig = config
        self._pattern = re.compile(config.action)
        self._counts = {"invalid_actions": 0.0, "return": 0.0}

    @abstractmethod
    async def begin(self, prompt: Prompt, *, seed: int) -> Outcome:
        """Begins an episode."""

    @abstractmethod
    async def act(self, text: str) -> Outcome:
        """Returns the answer to an action. Raises InvalidAction, before the environment has changed, if it is none."""

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """Returns the prompt's messages with the first observation, in the last message if that is the user's."""
        begun = await self.begin(prompt, seed=seed)
        form = self._form.first_observation
        seen = filled(self._form.observation if form is None else form, begun.values)
        messages = list(prompt.messages)
        if messages and messages[-1]["role"] == "user":
            said = messages.pop()["content"]
            seen = f"{said}\n\n{seen}" if said and seen else said or seen
        return [*messages, {"role": "user", "content": seen}]

    async def step(self, turn: Turn) -> Step:
        """Takes the action of a turn, and returns what follows."""
        try:
            outcome = await self.act(self.action_in(turn.message["content"]))
        except InvalidAction as why:
            return self.invalid(str(why))
        if outcome.done:
            return self.stepped(outcome, [])
        return self.stepped(outcome, [{"role": "user", "content": filled(self._form.observation, outcome.values)}])

    def stepped(self, outcome: Outcome, messages: Sequence[Message]) -> Step:
        """Returns the answer to a turn, with the return of the attempt so far among its numbers."""
        self._counts["return"] += outcome.reward
        return Step(
            messages=[] if outcome.done else messages,
            reward=outcome.reward,
            done=outcome.done,
            metrics={**self._counts, **outcome.metrics},
        )

    def action_in(self, said: str) -> str:
        """Returns the action's text. Raises InvalidAction if there is none."""
        found = [match for match in self._pattern.finditer(said) if match[0].strip()]
        text = (found[-1][1] if self._pattern.groups else found[-1][0]) if found else None
        if text is None or not text.strip():
            raise InvalidAction(f"there is no action in {said!r:.80}")
        return text.strip()

    def invalid(self, why: str, *, reward: float = 0.0, done: bool = False, messages: Sequence[Message] = ()) -> Step:
        """Returns the answer to a turn that is no action, or a part of which is none.

        Args:
            reward: that of the other part.
            done: whether the other part has ended the attempt.
            messages: answers to the other part.
        """
        self._counts["invalid_actions"] += 1
        over = done or self._counts["invalid_actions"] > self._form.max_invalid
        told = {"role": "user", "content": filled(self._form.invalid, {"error": why})}
        outcome = Outcome(values={}, reward=reward + self._form.invalid_reward, done=over)
        return self.stepped(outcome, [*messages, told])


def filled(form: str, values: Mapping[str, Any]) -> str:
    """Returns a text with the values of its names, arrays with all of their numbers.

    Example:
        >>> filled("You see {observation}.", {"observation": 3})
        'You see 3.'

    Raises:
        ValueError: it has another name.
    """
    try:
        # numpy would write 6 of a row's numbers in place of more than 1000.
        with np.printoptions(threshold=sys.maxsize):
            return form.format_map(values)
    except KeyError as error:
        names = ", ".join(sorted(map(str, values)))
        raise ValueError(f"the text {form!r:.80} names {error}; there are {names}") from None
