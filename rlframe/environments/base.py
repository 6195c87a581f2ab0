"""What an environment is: the side that answers the policy within one attempt."""

from abc import ABC, abstractmethod
from typing import Any

from rlframe.types.rollout import Rollout


class Environment(ABC):
    """Base of all environments. A file of this folder ends `COMPONENT, CONFIG = SingleTurn, SingleTurnConfig`."""

    @abstractmethod
    def __init__(self, config: Any):
        """Made from the file's CONFIG. All attempts share it: what belongs to one attempt is read from its rollout."""

    @abstractmethod
    def respond(self, rollout: Rollout) -> list[int] | None:
        """Tokens to append to the rollout so far before the policy goes on, or None when the attempt is over.

        They are an observation: the loss leaves them out.
        """
