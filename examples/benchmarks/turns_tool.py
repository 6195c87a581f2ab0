"""The environment of turns.py: a tool that takes its time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rlframe.environments.base import Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt

TOOL_WORDS = 96
"""Length of an answer. turns.py has the same number."""


@dataclass(kw_only=True, slots=True)
class WaitingConfig:
    """Settings of the tool."""

    turns: int
    tool_s: float


class Waiting(Environment):
    """Answers after `tool_s`, until the last turn."""

    def __init__(self, config: WaitingConfig):
        self._config, self._said = config, 0

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """The prompt."""
        return prompt.messages

    async def step(self, turn: Turn) -> Step:
        """The tool's output."""
        self._said += 1
        if self._said >= self._config.turns:
            return Step(done=True)
        await asyncio.sleep(self._config.tool_s)
        return Step(messages=[{"role": "user", "content": " ".join([f"w{self._said + 10}"] * TOOL_WORDS)}])
