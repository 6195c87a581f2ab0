"""Datasets that are made, not read, by their names."""

from rlframe.data.builtin import arithmetic, multiplication, questions, reasoning_gym, reasoning_gym_homework, verifiers
from rlframe.data.builtin.arithmetic import FORMER_NAMES, Split
from rlframe.data.records import Record

__all__ = ["FORMER_NAMES", "Split", "has", "held_out_problems", "records"]
NAMES = (*arithmetic.NAMES, *multiplication.NAMES, questions.NAME)
PACKAGES = {module.PREFIX: module for module in (reasoning_gym, verifiers)}
"""Modules that make the tasks of a package, by the beginning of their paths."""


def has(path: str) -> bool:
    """Returns whether `path` names a dataset that is made."""
    return path in NAMES or _has_own_problems(path)


def held_out_problems(path: str) -> str:
    """Returns a name of the problems that a dataset holds out: one name for datasets that hold out the same ones."""
    if _has_own_problems(path):
        return path
    return multiplication.__name__ if path in multiplication.NAMES else arithmetic.__name__


def short_name(path: str) -> str:
    """Returns the name of a dataset of a package, without its settings. Empty for other paths."""
    found = [module.parsed(path)[0] for prefix, module in PACKAGES.items() if path.startswith(prefix)]
    return found[0] if found else ""


def records(path: str, split: Split) -> list[Record]:
    """Returns the problems of one part of a dataset."""
    for prefix, module in PACKAGES.items():
        if path.startswith(prefix):
            return module.records(path, split)
    if path == reasoning_gym_homework.NAME:
        return reasoning_gym_homework.records(split)
    if path == questions.NAME:
        return questions.records(split)
    return (multiplication if path in multiplication.NAMES else arithmetic).records(path, split)


def _has_own_problems(path: str) -> bool:
    """Returns whether the dataset holds out problems of its own, unlike those of arithmetic and multiplication."""
    return path.startswith(tuple(PACKAGES)) or path in (reasoning_gym_homework.NAME, questions.NAME)
