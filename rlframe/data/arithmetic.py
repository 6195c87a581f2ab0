"""The built-in dataset: sums and differences of two numbers from 0 to 99. No file, no download.

15,050 problems: `a+b=` for every ordered pair, and `a-b=` for a >= b, so that no answer is negative and every answer is
digits only. A hash of the text, not a seed, puts a tenth of them aside for evaluation.
"""

import hashlib
from enum import StrEnum

from rlframe.data.records import Record

NAME = "arithmetic"
LARGEST_OPERAND = 99


class Split(StrEnum):
    """The two parts of the dataset; together they are all of it."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def split_of(problem: str) -> Split:
    """Which part a problem such as `37+48=` belongs to, now and always."""
    held_out = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8]) % 10 == 0
    return Split.HELD_OUT if held_out else Split.TRAIN


def records(split: Split) -> list[Record]:
    """The problems of one part, as {id, prompt, answer}, sums before differences, in numeric order.

    Example: {"id": "37+48=", "prompt": "37+48=", "answer": "85"}
    """
    numbers = range(LARGEST_OPERAND + 1)
    problems = [(f"{a}+{b}=", a + b) for a in numbers for b in numbers]
    problems += [(f"{a}-{b}=", a - b) for a in numbers for b in numbers if a >= b]
    return [
        Record(
            fields={"id": problem, "prompt": problem, "answer": str(answer)}, source=NAME, where=f"{NAME} {problem!r}"
        )
        for problem, answer in problems
        if split_of(problem) is split
    ]
