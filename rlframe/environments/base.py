"""The interface of an environment: the side that answers the policy within one attempt."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any

from rlframe.rollout.base.config import RolloutConfig
from rlframe.types.rollout import Rollout
from rlframe.utils.build import build
from rlframe.utils.registry import find

Observation = list[int] | None
"""The tokens that follow a response, or None if the attempt is over."""


class Environment(ABC):
    """Base of all environments. A file of this folder ends `COMPONENT, CONFIG = SingleTurn, SingleTurnConfig`."""

    @abstractmethod
    def __init__(self, config: Any):
        """Prepares the environment. All attempts share it, so state of one attempt must be read from its rollout."""

    @abstractmethod
    def respond(self, rollout: Rollout) -> Observation | Awaitable[Observation]:
        """Returns the tokens to append to the rollout before the policy continues, or None if the attempt is over.

        The tokens are an observation, which is not part of the loss. An environment that waits for something, such as a
        tool, is a coroutine function (`async def respond`): all attempts of a run share one event loop, where thousands
        wait at the same time, and a plain function that takes long holds all of them up.
        """


def find_environment(rollout: RolloutConfig) -> tuple[type[Environment], Any]:
    """Returns the class of the run's environment, and its settings.

    Raises:
        ConfigError: the environment does not exist, or has no such options.
    """
    component, settings = find("rlframe.environments", rollout.environment, key="rollout.environment")
    return component, build(settings, rollout.environment_options or {}, key="rollout.environment_options")
