"""The work of reward workers: scoring one attempt, or the attempts of a group, by one part. Light: imports no reward
before it is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from rlframe.processes.work import Limits, TaskFailed, Work
from rlframe.rewards.base import METHODS, Attempt, Reward, Score, Scores, build_reward
from rlframe.rewards.config import LARGEST_SCORE, Per, RewardTerm
from rlframe.utils.errors import RewardError

SIGNATURES = {
    Per.ATTEMPT: "def score(self, attempt: Attempt) -> float",
    Per.GROUP: "def score_group(self, attempts: Sequence[Attempt]) -> list[float]",
}
Task = tuple[str, Sequence[Attempt]]
"""Name of a part, and the attempts that it scores: one, or those of a group."""


@dataclass(frozen=True, slots=True)
class Scoring(Work):
    """The rewards of some parts."""

    parts: Mapping[str, RewardTerm]

    def prepare(self) -> Callable[[Task], Sequence[Scores]]:
        """Builds all rewards, which imports the user's code, and returns the function that does a task."""
        rewards = built(self.parts)

        def run(task: Task) -> Sequence[Scores]:
            name, attempts = task
            reward = rewards[name]
            if self.parts[name].per is Per.GROUP:
                return checked(reward.score_group(attempts), attempts)
            return checked([reward.score(attempt) for attempt in attempts], attempts)

        return run

    def limit_s(self, task: Task, limits: Limits) -> float:
        """Returns the part's own limit, if it has one."""
        return self.parts[task[0]].timeout_s or limits.timeout_s

    def kind(self, task: Task) -> str:
        """Returns the part's name: each may import something when it is first called."""
        return task[0]


@dataclass(frozen=True, slots=True)
class Describing(Work):
    """Says of a part, whose name is the task, which fields of a record it cannot be called without."""

    parts: Mapping[str, RewardTerm]

    def prepare(self) -> Callable[[str], list[str]]:
        """Builds all rewards, as for scoring."""
        rewards = built(self.parts)
        return lambda name: sorted(rewards[name].required_fields)


def built(parts: Mapping[str, RewardTerm]) -> dict[str, Reward]:
    """Returns the reward of each part, whose user's code is imported."""
    rewards = {name: build_reward(part, key=f"reward.parts.{name}") for name, part in parts.items()}
    for name, reward in rewards.items():
        check_method(reward, parts[name])
    return rewards


def check_method(reward: Reward, part: RewardTerm) -> None:
    """Raises RewardError if the class of a reward lacks the method that `part.per` calls."""
    if reward.scores(part.per):
        return
    other = next((per for per in Per if reward.scores(per)), None)
    instead = f", or set per: {other}, with which {METHODS[other]} is called" if other else ""
    raise RewardError(
        f"reward {part.name!r}: the class must define {METHODS[part.per]}, which per={part.per} calls; add "
        f"`{SIGNATURES[part.per]}`{instead}"
    )


def checked(found: Any, attempts: Sequence[Attempt]) -> list[Scores]:
    """Returns the scores of some attempts.

    Raises:
        TaskFailed: what a reward gave are no scores.
    """
    # Arrays of numpy and tensors of torch.
    found = found.tolist() if hasattr(found, "tolist") else found
    if not is_list(found) or len(found) != len(attempts):
        raise TaskFailed(
            f"a reward per group must be a list of {len(attempts)}, one for each attempt, got {found!r:.60}"
        )
    return [_scores(each, attempt) for each, attempt in zip(found, attempts, strict=True)]


def is_list(found: Any) -> bool:
    """Returns whether a value is a list, or like one."""
    return isinstance(found, Sequence) and not isinstance(found, str | bytes)


def _scores(found: Any, attempt: Attempt) -> Scores:
    if not is_list(found):
        return _score(found)
    if len(found) != attempt.num_turns:
        raise TaskFailed(
            f"a reward by turn must be a list of {attempt.num_turns}, one for each turn, got {found!r:.60}"
        )
    return [_score(each) for each in found]


def _is_small(number: Any) -> bool:
    return -LARGEST_SCORE <= number <= LARGEST_SCORE


def _score(found: Any) -> Score:
    if found is None:
        return None
    # Scalars of numpy and torch, whose truth values are no numbers to Python.
    number = found.item() if getattr(found, "ndim", None) == 0 else found
    # Python's whole numbers may be larger than any float.
    if not isinstance(number, Real) or not _is_small(number):
        raise TaskFailed(
            f"a reward must be a finite number of at most {LARGEST_SCORE:g} in size, or None, got {found!r:.60}"
        )
    return float(number)
