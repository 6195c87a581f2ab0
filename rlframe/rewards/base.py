"""What a reward is: a number for one attempt. One file each, without torch, because it runs in light processes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlframe.rewards.config import RewardTerm
from rlframe.types.rollout import FinishReason
from rlframe.utils import registry
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError, RewardError
from rlframe.utils.faults import Fault
from rlframe.utils.outside import is_outside

USERS = "python"
"""The reward that calls a function of the user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What a reward gets to see of a rollout.

    Example:
        >>> Attempt(prompt_text="<user>2+3=<end><assistant>", response_text="5", answer="5", num_response_tokens=2,
        ...         finish_reason=FinishReason.STOP)
    """

    prompt_text: str
    """The rendered chat template, up to and including the generation prompt."""
    response_text: str
    """All turns after the prompt, special tokens left out."""
    answer: str | None
    """Ground truth, where the data has one."""
    num_response_tokens: int
    """Sampled tokens, the stop token included."""
    finish_reason: FinishReason
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The raw record of the prompt."""
    source: str = ""
    """Name of the dataset the prompt came from."""

    def required_answer(self) -> str:
        """The answer, for rewards that cannot do without.

        Raises:
            RewardError: the record has none.
        """
        if self.answer is None:
            raise RewardError("the record has no answer; name its field with data.answer_key")
        return self.answer


class Reward(ABC):
    """Base of all rewards. A file of this folder ends `COMPONENT, CONFIG = ExactMatch, ExactMatchConfig`."""

    needs_answer: bool = False
    """It compares with the record's answer: data in which no record has one is refused."""

    @abstractmethod
    def __init__(self, config: Any):
        """Made once per worker process from the file's CONFIG; expensive preparation belongs here."""

    @abstractmethod
    def score(self, attempt: Attempt) -> float | None:
        """Returns a finite number; more is better. None says that this reward does not apply to the attempt: it is left
        out of the sum. Raising makes this one attempt a failed sample, nothing else."""


def build_reward(part: RewardTerm, *, key: str) -> Reward:
    """Builds the reward that `part` asks for. A function of the user's is imported, so call this where it may do harm.

    Args:
        key: dotted config key of the part, for error messages.

    Raises:
        ConfigError: no such reward, or an option it does not have.
        RewardError: a user's function that cannot be imported.
    """
    component, config = _find(part, key)
    return component(config)


def part_faults(part: RewardTerm, key: str) -> list[Fault]:
    """Returns what is wrong with the name and the options of `part`, without importing a function of the user's."""
    try:
        _find(part, key)
    except ConfigError as error:
        return error.faults
    return []


def is_users(part: RewardTerm) -> bool:
    """Returns whether the reward is a function of the user's."""
    return is_outside(part.name) or part.name == USERS


def _find(part: RewardTerm, key: str) -> tuple[type[Reward], Any]:
    """Returns the class of the reward and its settings. What a name of the user's stands for is looked up later."""
    name, options = part.name, part.options
    if is_outside(name):
        name, options = USERS, {"function": name, "options": options}
    component, config = registry.find("rlframe.rewards", name, key=f"{key}.name")
    return component, build(config, options, key=f"{key}.options")
