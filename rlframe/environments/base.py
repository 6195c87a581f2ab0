"""What an environment is: the side that answers the policy within one attempt."""

from abc import ABC, abstractmethod
from typing import Any

from rlframe.rollout.base.config import RolloutConfig
from rlframe.types.rollout import Rollout
from rlframe.utils.build import build
from rlframe.utils.registry import find


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


def find_environment(rollout: RolloutConfig) -> tuple[type[Environment], Any]:
    """Returns the class of the run's environment, and its settings.

    Raises:
        ConfigError: there is no such environment, or it has not these options.
    """
    component, settings = find("rlframe.environments", rollout.environment, key="rollout.environment")
    return component, build(settings, rollout.environment_options or {}, key="rollout.environment_options")
