"""Environments that talk."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rlframe.environments.base import Environment, Step, Turn
from rlframe.environments.config import Verdict
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt


@dataclass(kw_only=True, slots=True)
class GameConfig:
    """Settings of the game."""

    verdict: Verdict = Verdict.TRAIN
    fails: bool = False


class Game(Environment):
    """Counts, pays one for each turn, and ends with a verdict when it is told `stop`."""

    deterministic: ClassVar[bool] = True
    rewards: ClassVar[bool] = True

    def __init__(self, config: GameConfig):
        self._config, self._said = config, 0

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        self._start = self.start(seed)
        return [{"role": "system", "content": f"from {self._start}"}, *prompt.messages]

    def start(self, seed: int) -> int:
        return seed % 7

    async def step(self, turn: Turn) -> Step:
        if self._config.fails:
            raise RuntimeError("the game is broken")
        self._said += 1
        if "stop" in turn.text:
            return Step(done=True, reward=1.0, verdict=self._config.verdict, metrics={"said": self._said})
        return Step(messages=[{"role": "user", "content": f"{self._start + self._said}"}], reward=1.0)


class OtherGame(Game):
    """Begins somewhere else each time."""

    def start(self, seed: int) -> int:
        return int.from_bytes(os.urandom(4))


class UnknownGame(Game):
    """Begins at the same place each time, and does not promise it."""

    deterministic: ClassVar[bool] = False


class Rooms(Game):
    """Names its states: two rooms, in turns."""

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return replace(step, state=f"room {self._said % 2}")


class Unready(Game):
    """Fails at the turn that says `stop`."""

    async def step(self, turn: Turn) -> Step:
        if "stop" in turn.text:
            raise RuntimeError("the game is broken")
        return await super().step(turn)


class Clinging(Game):
    """Fails when it is over."""

    async def close(self) -> None:
        raise RuntimeError("the game cannot end")
