"""One prompt, one response."""

from dataclasses import dataclass

from rlframe.environments.base import Environment
from rlframe.types.rollout import Rollout


@dataclass(kw_only=True, slots=True)
class SingleTurnConfig:
    """Nothing to set."""


class SingleTurn(Environment):
    """Every attempt is over after the first response."""

    def __init__(self, config: SingleTurnConfig):
        pass

    def respond(self, rollout: Rollout) -> None:
        """None, always."""
        return None


COMPONENT, CONFIG = SingleTurn, SingleTurnConfig
