"""The interface of an environment: the other side of an attempt. Imports no torch, because sessions run in light
processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, TypeVar

import numpy as np

from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason
from rlframe.types.turn import CallEnd
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.registry import find

T = TypeVar("T")
LARGEST_REWARD = 1e6
"""Greatest absolute value of a reward. A greater one is a mistake, and a single such number would decide a whole
step."""
ANSWERING_ROLES = ("system", "user", "tool")
"""Roles of the messages that an environment writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One response of the policy."""

    message: Message
    """The response as a message of the role `assistant`: `content`, and where there are any `reasoning_content` and
    `tool_calls`."""
    text: str
    """The response as it was sampled, special tokens left out."""
    finish_reason: FinishReason
    malformed: tuple[str, ...] = ()
    """Sentences about calls of tools that could not be read. They are not among the `tool_calls`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The answer of an environment to a turn.

    Example:
        >>> Step(messages=[{"role": "tool", "content": "42"}])
        >>> Step(done=True, reward=1.0)
    """

    messages: Sequence[Message] = ()
    """The messages that the policy sees next, of the roles `user`, `tool` or `system`. At least one unless `done`."""
    reward: float = 0.0
    """Reward of the turn, which counts in addition to what reward functions give."""
    done: bool = False
    """Whether the attempt is over."""
    verdict: Verdict = Verdict.TRAIN
    """The verdict on the attempt, if it is over. Other values than `train` end it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged as the mean over attempts, each under `environment/NAME`. Those of later turns replace
    those of earlier ones."""
    calls: Sequence[str] = ()
    """The CallEnd of each call of a tool that the turn made, for rewards. Empty says nothing."""
    state: str | None = None
    """Name of the state in which the policy now is, such as a board or a page. Turns of one group in the same state are
    compared with each other by `algorithm.credit.by=state`. None means that the messages say which state it is."""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if a field is not what it must be."""
        if isinstance(self.messages, str | bytes | Mapping) or not isinstance(self.messages, Sequence):
            raise TypeError(f"Step.messages must be a list of messages, got {self.messages!r:.80}")
        object.__setattr__(self, "messages", [checked(message) for message in self.messages])
        if not isinstance(self.done, bool | np.bool_):
            raise TypeError(f"Step.done must be True or False, got {self.done!r:.80}")
        object.__setattr__(self, "done", bool(self.done))
        object.__setattr__(self, "verdict", Verdict(self.verdict))
        object.__setattr__(self, "reward", number("Step.reward", self.reward))
        if not isinstance(self.metrics, Mapping) or any(not isinstance(name, str) for name in self.metrics):
            raise TypeError(f"Step.metrics must be numbers by name, got {self.metrics!r:.80}")
        numbers = {name: number(f"Step.metrics[{name!r:.40}]", value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", numbers)
        if isinstance(self.calls, str) or not isinstance(self.calls, Sequence):
            raise TypeError(f"Step.calls must be a list of ends of calls, got {self.calls!r:.80}")
        object.__setattr__(self, "calls", [CallEnd(end) for end in self.calls])
        if not isinstance(self.state, str | None):
            raise TypeError(f"Step.state must be text or None, got {self.state!r:.80}")
        if not (self.messages or self.is_over):
            raise ValueError("Step must have messages, or end the attempt with done=True")

    @property
    def is_over(self) -> bool:
        """Returns whether the attempt ends with this step."""
        return self.done or self.verdict is not Verdict.TRAIN


class Environment(ABC):
    """Base of all environments. A file of this folder ends `COMPONENT, CONFIG = Tools, ToolsConfig`.

    An object is the session of one attempt. Many sessions share a process and an event loop, so their methods are
    coroutines: one that computes for long holds the others of its process up, and is ended with its attempt after
    `environment.step_timeout_s`. Whatever a method raises ends its attempt only.
    """

    answers: ClassVar[bool] = True
    """Whether there are sessions. If not, every attempt is over after its first response."""
    rewards: ClassVar[bool] = False
    """Whether steps give rewards, so that a run needs no reward functions."""
    deterministic: ClassVar[bool] = False
    """Whether the same prompt, seed and turns always give the same answers. When a run resumes, unfinished attempts
    then go on: their turns are repeated to a new session. Otherwise they begin anew."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the policy may call, `{"type": "function", "function": {...}}`. They are read
    after `reset`, and the chat template writes them into the prompt."""

    @classmethod
    def faults(cls, config: Any, sessions: EnvironmentConfig) -> Iterator[Fault]:
        """Yields the faults of the settings beside those of the sessions, with keys below `environment.options`."""
        yield from ()

    @classmethod  # noqa: B027 - most environments share nothing
    def prepare(cls, config: Any) -> None:
        """Prepares what all sessions of a process share, once for each process: a corpus, a connection. The place for
        it is a class attribute."""

    @abstractmethod
    def __init__(self, config: Any):
        """Makes a session."""

    @abstractmethod
    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """Returns the conversation that the policy continues. For a prompt of the data these are `prompt.messages`.

        Args:
            prompt: the prompt without its tokens.
            seed: the same number for all attempts at one prompt of one step.
        """

    @abstractmethod
    async def step(self, turn: Turn) -> Step:
        """Returns the answer to a turn."""

    async def close(self) -> None:  # noqa: B027 - most sessions hold nothing
        """Releases what the session holds. Called once, however the attempt ended, unless its process has died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The place where the agent of one attempt asks the policy, as the OpenAI API says. It ends with the attempt."""

    url: str
    """Base URL of the API, which ends with `/v1`."""
    key: str
    """The API key. Every request without it is refused."""
    seed: int
    """The same number for all attempts at one prompt of one step."""
    model: str = "policy"
    """Name of the model. Any other name means the same."""


class Agent(Environment):
    """Base of environments whose sessions ask the policy by themselves, as often and in whatever order they like.

    `run` is called after `reset`, in the place of `step`. It may take as long as `rollout.attempt_timeout_s`, but must
    not be without a request under way for longer than `environment.step_timeout_s`.
    """

    @classmethod
    def most_at_once(cls, config: Any) -> int | None:
        """Returns the greatest number of agents that run at the same time, or None if there is no limit."""
        return None

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """Takes the prompt. What it returns is not used: the agent's calls say what the policy sees."""
        self.prompt = prompt
        return prompt.messages

    async def step(self, turn: Turn) -> Step:
        """Raises an error: nobody calls it."""
        raise AssertionError("an agent has the policy's turns from its endpoint")

    @abstractmethod
    async def run(self, endpoint: Endpoint) -> Step:
        """Does the prompt's task. Returns a step that ends the attempt; its reward lies at the policy's last token.

        It is cancelled where the attempt ends before it.
        """


def find_environment(config: EnvironmentConfig) -> tuple[type[Environment], Any]:
    """Returns the class of the run's environment, and its settings.

    Raises:
        ConfigError: the environment does not exist, or has no such options.
    """
    component, settings = find("rlframe.environments", config.name, key="environment.name")
    return component, build(settings, config.options, key="environment.options")


def answers(config: EnvironmentConfig) -> bool:
    """Returns whether the run's environment has sessions. One that does not exist counts as one that has."""
    return _stated(config, "answers")


def rewards(config: EnvironmentConfig) -> bool:
    """Returns whether the run's environment gives rewards. One that does not exist counts as one that does."""
    return _stated(config, "rewards")


def pays_all(config: EnvironmentConfig) -> bool:
    """Returns whether steps of the run's environment give each attempt a reward, which may be 0. An agent need not say
    one."""
    return rewards(config) and not asks(config)


def asks(config: EnvironmentConfig) -> bool:
    """Returns whether the run's environment has agents. One that does not exist counts as one that has none."""
    try:
        return issubclass(find("rlframe.environments", config.name, key="environment.name")[0], Agent)
    except ConfigError:
        return False


def _stated(config: EnvironmentConfig, name: str) -> bool:
    try:
        return getattr(find("rlframe.environments", config.name, key="environment.name")[0], name)
    except ConfigError:
        return True


def checked(message: Any) -> Message:
    """Returns a message that an environment has written.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"a message must be a dict, got {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if role not in ANSWERING_ROLES:
        raise ValueError(f"the role of a message must be one of {', '.join(ANSWERING_ROLES)}, got {role!r:.40}")
    if not isinstance(content, str):
        raise TypeError(f"the content of a message must be text, got {content!r:.80}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        # A tokenizer takes no half of a surrogate pair.
        raise ValueError(f"the content of a message must be Unicode, got {content[: error.end][-80:]!r}") from None
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise TypeError(f"the field {name} of a message must be text, got {message[name]!r:.80}")
    if unknown := sorted(map(str, set(message) - {"role", "content", "name", "tool_call_id"})):
        raise ValueError(f"a message must have role, content, name or tool_call_id, got also {', '.join(unknown):.80}")
    return dict(message)


def in_thread(work: Callable[..., T], /, *given: Any, **named: Any) -> T:
    """Returns what users' code returns in a thread. StopIteration becomes a RuntimeError, as it does in coroutines:
    asyncio hands it to nobody, so that who waits would wait for ever."""
    try:
        return work(*given, **named)
    except StopIteration as error:
        raise RuntimeError(repr(error)) from error


def opened(messages: Any) -> list[Message]:
    """Returns the conversation that a session begins with.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"reset must return a list of messages, got {messages!r:.80}")
    if not messages:
        raise ValueError("reset must return at least one message, got none")
    found = []
    for message in messages:
        # A prompt may hold examples of the assistant's turns.
        given = isinstance(message, Mapping) and message.get("role") == "assistant"
        found.append(dict(message) if given else checked(message))
    return found


def number(name: str, value: Any) -> float:
    """Returns a finite number, which a truth value is too.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(value, Real | np.bool_):
        raise TypeError(f"{name} must be a number, got {value!r:.80}")
    found = float(value)
    if not math.isfinite(found) or abs(found) > LARGEST_REWARD:
        raise ValueError(f"{name} must be a finite number of at most {LARGEST_REWARD:g} in size, got {value!r:.40}")
    return found
