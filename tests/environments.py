"""Environments for tests, which workers import by name."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlframe.environments.base import Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt


@dataclass(kw_only=True, slots=True)
class OneMoreTurnConfig:
    """Holds the answer."""

    answer: str = "w10"


class OneMoreTurn(Environment):
    """Answers the first response, and ends the attempt after the second."""

    deterministic = True

    def __init__(self, config: OneMoreTurnConfig):
        self._answer, self._answered = config.answer, False

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": prompt.text}]

    async def step(self, turn: Turn) -> Step:
        if self._answered:
            return Step(done=True)
        self._answered = True
        return Step(messages=[{"role": "user", "content": self._answer}])


class FailsOnOne(Environment):
    """Raises for the prompt p1, and ends every other attempt after its first response."""

    def __init__(self, config: OneMoreTurnConfig):
        pass

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        self._id = prompt.id
        return [{"role": "user", "content": prompt.text}]

    async def step(self, turn: Turn) -> Step:
        if self._id == "p1":
            raise RuntimeError("no session left")
        return Step(done=True)
