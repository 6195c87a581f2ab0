"""An environment whose first processes do not start, and whose sessions tell their process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlframe.environments.base import Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt


@dataclass(kw_only=True, slots=True)
class StartingConfig:
    """Settings of the starts."""

    folder: str = ""
    """Folder in which each process that does not start leaves a file."""
    failures: int = 0
    """Number of processes that do not start."""


class Starting(Environment):
    """Is over after the first turn."""

    @classmethod
    def prepare(cls, config: StartingConfig) -> None:
        folder = Path(config.folder)
        if config.failures > len(list(folder.iterdir())):
            (folder / str(os.getpid())).touch()
            raise OSError("not yet")

    def __init__(self, config: StartingConfig):
        pass

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": prompt.text}]

    async def step(self, turn: Turn) -> Step:
        return Step(done=True, metrics={"process": float(os.getpid() % 10**6)})


COMPONENT, CONFIG = Starting, StartingConfig
