"""The interface of a reward: a number for one attempt, or for each of its turns. One file each, without torch, because
rewards run in light processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rlframe.rewards.config import Per, RewardTerm
from rlframe.types.messages import Message
from rlframe.types.rollout import FinishReason
from rlframe.types.turn import TurnRecord
from rlframe.utils import registry
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError, RewardError
from rlframe.utils.faults import Fault, Key
from rlframe.utils.outside import is_outside

USERS = "python"
"""Name of the reward that calls a user's function."""
Score = float | None
"""More is better. None means that the reward does not apply."""
Scores = Score | Sequence[Score]
"""The score of an attempt, or of each of its turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The data of a rollout that a reward can use.

    Example:
        >>> Attempt(prompt_text="<user>2+3=<end><assistant>", response_text="5", answer="5", num_response_tokens=2,
        ...         finish_reason=FinishReason.STOP)
    """

    prompt_text: str
    """The rendered chat template, up to and including the generation prompt."""
    response_text: str
    """The policy's last response, without special tokens."""
    answer: str | None
    """Ground truth. None if the data has none."""
    num_response_tokens: int
    """Number of tokens that the policy sampled in the whole attempt, stop tokens included."""
    finish_reason: FinishReason
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The raw record of the prompt."""
    source: str = ""
    """Name of the dataset the prompt came from."""
    messages: Sequence[Message] = ()
    """The whole conversation: the prompt, the policy's turns with their `tool_calls`, and the environment's answers."""
    num_turns: int = 1
    """Number of responses of the policy."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment about the attempt."""
    turns: Sequence[TurnRecord] = ()
    """A record of each response of the policy: why it stopped, what became of its calls of tools, the environment's
    reward. There are as many as `num_turns`."""
    ending: str = ""
    """The reason why the attempt ended: `done`, or what docs/environments.md lists: a limit such as `too_many_turns`,
    or a trouble such as `raised`. Empty if unknown."""

    def required_answer(self) -> str:
        """Returns the answer, for rewards that need one.

        Raises:
            RewardError: the record has none, or an empty one, which an empty response would equal.
        """
        if self.answer is None:
            raise RewardError("the record has no answer; name its field with data.answer_key")
        if not self.answer.strip():
            raise RewardError("the record's answer is empty; leave such records out")
        return self.answer


METHODS = {Per.ATTEMPT: "score", Per.GROUP: "score_group"}
"""Name of the method of a Reward by the thing that it is given at a time."""


class Reward(ABC):
    """Base of all rewards. A file of this folder ends `COMPONENT, CONFIG = ExactMatch, ExactMatchConfig`."""

    required_fields: Set[str] = frozenset()
    """Fields of the record without which it cannot be called."""
    needs_answer: bool = False
    """Whether the reward compares with the record's answer. Data in which no record has an answer is then refused."""
    per: frozenset[Per] = frozenset({Per.ATTEMPT})
    """The things that the reward can be given at a time."""

    @classmethod
    def faults(cls, config: Any) -> Iterator[Fault]:
        """Yields the faults of the settings in this place, such as a program that is missing, with keys below
        `options`."""
        yield from ()

    @abstractmethod
    def __init__(self, config: Any):
        """Prepares the reward, once per worker process. Expensive preparation belongs here."""

    def scores(self, per: Per) -> bool:
        """Returns whether it can be given that at a time: whether the class has `score`, or `score_group`."""
        name = METHODS[per]
        return getattr(type(self), name) is not getattr(Reward, name)

    def score(self, attempt: Attempt) -> Scores:
        """Returns a finite number; more is better. None means that the reward does not apply to the attempt and is left
        out of the sum. A list has a number, or None, for each turn of the policy; each counts at the end of its turn.
        An exception makes this attempt a failed sample, without further effect."""
        raise _lacks(self, METHODS[Per.ATTEMPT])

    def score_group(self, attempts: Sequence[Attempt]) -> Sequence[Scores]:
        """Returns what `score` would for each of the attempts at one prompt, all of which are over."""
        raise _lacks(self, METHODS[Per.GROUP])

    @property
    def extracts(self) -> bool:
        """Returns whether the class has `extract`."""
        return type(self).extract is not Reward.extract

    def extract(self, attempt: Attempt) -> str | None:
        """Returns the answer that the response gives, equal for answers that mean the same, or None if it gives none:
        the vote of an attempt in maj@k."""
        raise _lacks(self, "extract")


def _lacks(reward: Reward, method: str) -> RewardError:
    """Returns the error for a call that `Reward.scores` or `Reward.extracts` would have forbidden. Workers look there
    before the first attempt; this is for those who call a reward themselves."""
    return RewardError(f"{type(reward).__name__} must define {method}(), which its caller needs")


class Unanswered(Exception):
    """Raised by a Judging reward that has no score of its own."""

    def __init__(self, trouble: str, why: str, *, scores: Sequence[Scores] | None):
        """
        Args:
            trouble: a word, by which it is counted.
            scores: scores that count instead. None makes it a failure.
        """
        super().__init__(why)
        self.trouble, self.scores = trouble, scores


BEGIN: ContextVar[Callable[[], None]] = ContextVar("BEGIN")
"""Begins the time of the call of `judge` that is under way. A second call does nothing."""


def begin() -> None:
    """Begins the time of the call of `judge` that is under way, if it has not begun."""
    BEGIN.get(_nothing)()


def _nothing() -> None:
    """Does nothing: outside of a call there is no limit."""


class Judging(Reward):
    """Base of rewards that wait for others, such as judges. They share an event loop of the process that runs attempts,
    many calls at a time, and are no code of users."""

    at_once: int = 1
    """Greatest number of calls of `judge` at a time."""
    begins: bool = False
    """Whether it calls `begin` when a call begins for its limit of time, because calls wait for each other before."""

    @abstractmethod
    async def judge(self, attempts: Sequence[Attempt], per: Per) -> Sequence[Scores]:
        """Returns the scores of one attempt, or of all attempts at one prompt, as `per` says.

        Raises:
            Unanswered: there is no score.
        """

    @abstractmethod
    def without(self, trouble: str, why: str, attempts: Sequence[Attempt]) -> Unanswered:
        """Returns the error for attempts that it gave no score, with what counts instead."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases connections."""


def build_reward(part: RewardTerm, *, key: str) -> Reward:
    """Builds the reward of `part`. A user's function is imported, so call it only in a process that it may harm.

    Args:
        key: dotted config key of the part, for error messages.

    Raises:
        ConfigError: the reward does not exist, or has no such option.
        RewardError: a user's function cannot be imported.
    """
    component, config = _find(part, key)
    return component(config)


def part_faults(part: RewardTerm, key: str) -> list[Fault]:
    """Returns the faults in the name and the options of `part`, without importing a user's function."""
    try:
        component, config = _find(part, key)
    except ConfigError as error:
        return error.faults
    wrong = [fault.below(Key.of(f"{key}.options")) for fault in component.faults(config)]
    if part.per not in component.per:
        able = " or ".join(sorted(component.per))
        wrong.append(Fault(f"{key}.per", f"must be {able} for the reward {part.name}", got=part.per))
    return wrong


def is_judging(part: RewardTerm) -> bool:
    """Returns whether the reward waits for others, and so needs no process of its own."""
    return not is_users(part) and issubclass(_find(part, "")[0], Judging)


def is_users(part: RewardTerm) -> bool:
    """Returns whether the reward is a user's function."""
    return is_outside(part.name) or part.name == USERS


def _find(part: RewardTerm, key: str) -> tuple[type[Reward], Any]:
    """Returns the class of the reward and its settings. A user's function is not looked up yet."""
    name, options = part.name, part.options
    if is_outside(name):
        name, options = USERS, {"function": name, "options": options}
    component, config = registry.find("rlframe.rewards", name, key=f"{key}.name")
    return component, build(config, options, key=f"{key}.options")
