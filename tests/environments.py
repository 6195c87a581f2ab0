"""Environments for tests, which workers import by name."""

from dataclasses import dataclass

from rlframe.environments.base import Environment
from rlframe.types.rollout import Rollout


@dataclass(kw_only=True, slots=True)
class OneMoreTurnConfig:
    """Holds the answer."""

    tokens: tuple[int, ...] = (3, 10, 4)


class OneMoreTurn(Environment):
    """Answers the first response, and ends the attempt after the second."""

    def __init__(self, config: OneMoreTurnConfig):
        self._tokens = list(config.tokens)

    def respond(self, rollout: Rollout) -> list[int] | None:
        return self._tokens if len(rollout.spans) == 1 else None


class FailsOnOne(Environment):
    """Raises for the prompt p1, and ends every other attempt after its first response."""

    def __init__(self, config: OneMoreTurnConfig):
        pass

    def respond(self, rollout: Rollout) -> None:
        if rollout.prompt.id == "p1":
            raise RuntimeError("no session left")
