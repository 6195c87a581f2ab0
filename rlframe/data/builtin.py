"""Datasets that are made, not read, by their names."""

from rlframe.data import arithmetic, multiplication, reasoning_gym
from rlframe.data.arithmetic import FORMER_NAMES, Split
from rlframe.data.records import Record

__all__ = ["FORMER_NAMES", "Split", "has", "has_own_problems", "records"]
NAMES = (*arithmetic.NAMES, *multiplication.NAMES)


def has(path: str) -> bool:
    """Returns whether `path` names a dataset that is made."""
    return path in NAMES or has_own_problems(path)


def has_own_problems(path: str) -> bool:
    """Returns whether the dataset holds out problems of its own, unlike the others, which hold out the same ones."""
    return path.startswith(reasoning_gym.PREFIX)


def records(path: str, split: Split) -> list[Record]:
    """Returns the problems of one part of a dataset."""
    if has_own_problems(path):
        return reasoning_gym.records(path, split)
    return (multiplication if path in multiplication.NAMES else arithmetic).records(path, split)
