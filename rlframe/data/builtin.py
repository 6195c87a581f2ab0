"""The built-in datasets by their names."""

from rlframe.data import arithmetic, multiplication
from rlframe.data.arithmetic import FORMER_NAMES, Split
from rlframe.data.records import Record

__all__ = ["FORMER_NAMES", "NAMES", "Split", "records"]
NAMES = (*arithmetic.NAMES, *multiplication.NAMES)


def records(name: str, split: Split) -> list[Record]:
    """Returns the problems of one part of a dataset."""
    return (multiplication if name in multiplication.NAMES else arithmetic).records(name, split)
