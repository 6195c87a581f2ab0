"""Calls between the runner and the processes of sessions, and their answers. Light: these processes import it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rlframe.attempts.dialogue import Answer
from rlframe.environments.base import Endpoint, Environment, Turn, find_environment
from rlframe.environments.config import EnvironmentConfig
from rlframe.processes.work import Limits
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.utils import outside
from rlframe.utils.errors import RlframeError

ANSWER_BYTES = 1 << 20
"""Greatest size of an answer, as JSON."""


class Trouble(StrEnum):
    """Ways in which a session fails."""

    RAISED = "raised"
    """It raised an error."""
    TOOK_TOO_LONG = "took_too_long"
    """It did not answer in time."""
    DIED = "died"
    """It ended its process, or wrote into the pipe of the answers."""
    NO_ANSWER = "no_answer"
    """It returned something that is no answer."""
    NOT_RENDERED = "not_rendered"
    """The chat template cannot write its messages."""
    NEVER_CALLED = "never_called"
    """It is an agent that ended without a response of the policy."""
    NEIGHBOUR = "neighbour"
    """Another session of its process ended the process. It did nothing wrong."""


class SessionFailed(Exception):
    """Raised if a session cannot go on."""

    def __init__(self, trouble: Trouble, why: str):
        super().__init__(why)
        self.trouble = trouble
        self.answer = Answer()
        """The part of the last turn that is known all the same: the response as a message, and what the environment
        answered before it failed."""


class CannotStart(RlframeError):
    """Raised if processes of sessions cannot be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings of a process of sessions."""

    environment: EnvironmentConfig
    folder: str
    """The driver's working folder, to which paths in the configuration are relative."""
    sources: Mapping[str, tuple[str, str]]
    """The driver's files of components from outside; see `rlframe.utils.outside`."""

    @property
    def limits(self) -> Limits:
        """The limits of a process."""
        config = self.environment
        return Limits(timeout_s=config.step_timeout_s, memory_gb=config.memory_gb, answer_bytes=ANSWER_BYTES)

    def prepare(self) -> tuple[type[Environment], Any]:
        """Returns the environment's class, prepared in this process, and its settings."""
        outside.receive(self.sources)
        component, settings = find_environment(self.environment)
        component.prepare(settings)
        return component, settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset:
    """Begins a session."""

    prompt: Prompt
    seed: int

    @classmethod
    def of(cls, prompt: Prompt, *, seed: int) -> "Reset":
        """Returns the call for a prompt, whose tokens do not travel."""
        return cls(prompt=replace(prompt, input=ModelInput(np.zeros(0))), seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Lets the agent of a session begin."""

    endpoint: Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Asks for the end of an agent, for which it waits a little."""

    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """Ends a session."""


Call = Reset | Turn | Run | Look | Close


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    """A call, with its number and that of its session."""

    number: int
    session: int
    call: Call


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The beginning of a session."""

    messages: list[Message]
    tools: list[dict[str, Any]]
