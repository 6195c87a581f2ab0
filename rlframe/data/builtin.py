"""Datasets that are made, not read, by their names."""

from rlframe.data import arithmetic, multiplication, reasoning_gym, reasoning_gym_homework
from rlframe.data.arithmetic import FORMER_NAMES, Split
from rlframe.data.records import Record

__all__ = ["FORMER_NAMES", "Split", "has", "has_own_problems", "records"]
NAMES = (*arithmetic.NAMES, *multiplication.NAMES)


def has(path: str) -> bool:
    """Returns whether `path` names a dataset that is made."""
    return path in NAMES or has_own_problems(path)


def has_own_problems(path: str) -> bool:
    """Returns whether the dataset holds out problems of its own, unlike the others, which hold out the same ones."""
    return path.startswith(reasoning_gym.PREFIX) or path == reasoning_gym_homework.NAME


def short_name(path: str) -> str:
    """Returns the name of a dataset with settings without them, and no text for other paths."""
    return reasoning_gym.parsed(path)[0] if path.startswith(reasoning_gym.PREFIX) else ""


def records(path: str, split: Split) -> list[Record]:
    """Returns the problems of one part of a dataset."""
    if path == reasoning_gym_homework.NAME:
        return reasoning_gym_homework.records(split)
    if has_own_problems(path):
        return reasoning_gym.records(path, split)
    return (multiplication if path in multiplication.NAMES else arithmetic).records(path, split)
