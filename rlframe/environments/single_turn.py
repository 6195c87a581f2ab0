"""One prompt and one response."""

from dataclasses import dataclass

from rlframe.environments.base import Environment
from rlframe.types.rollout import Rollout


@dataclass(kw_only=True, slots=True)
class SingleTurnConfig:
    """No settings."""


class SingleTurn(Environment):
    """Ends every attempt after its first response."""

    def __init__(self, config: SingleTurnConfig):
        pass

    def respond(self, rollout: Rollout) -> None:
        """Ends the attempt, because there is no further observation."""
        return None


COMPONENT, CONFIG = SingleTurn, SingleTurnConfig
