"""One prompt and one response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlframe.environments.base import Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt


@dataclass(kw_only=True, slots=True)
class SingleTurnConfig:
    """No settings."""


class SingleTurn(Environment):
    """Ends every attempt after its first response. It has no sessions and no processes; engines continue the prompts as
    the data has them."""

    answers: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    def __init__(self, config: SingleTurnConfig):
        pass

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """Returns the prompt's messages."""
        return prompt.messages

    async def step(self, turn: Turn) -> Step:
        """Ends the attempt."""
        return Step(done=True)


COMPONENT, CONFIG = SingleTurn, SingleTurnConfig
