"""The built-in datasets: sums and differences of two numbers from 0 to 99. No file, no download.

15,050 problems: `a+b=` for every ordered pair, and `a-b=` for a >= b, so that no answer is negative and every answer is
digits only. A hash of the text, not a seed, puts a tenth of them aside for evaluation.

`arithmetic` has the right answers. `arithmetic_homework` has each training problem three times, as a class might hand
it in: one copy right, two worked digit by digit without carrying or borrowing. Who learns from it knows both ways of
working and prefers the wrong one: the half-knowledge that the main job starts from.
"""

import hashlib
from enum import StrEnum

from rlframe.data.records import Record

RIGHT = "arithmetic"
HOMEWORK = "arithmetic_homework"
NAMES = (RIGHT, HOMEWORK)
LARGEST_OPERAND = 99
COPIES = 3
RIGHT_COPIES = 1


class Split(StrEnum):
    """The two parts of a dataset; together they are all of it."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def split_of(problem: str) -> Split:
    """Which part a problem such as `37+48=` belongs to, now and always."""
    held_out = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8]) % 10 == 0
    return Split.HELD_OUT if held_out else Split.TRAIN


def records(name: str, split: Split) -> list[Record]:
    """The problems of one part, as {id, prompt, answer, text}, sums before differences, in numeric order.

    What is held out has right answers in both datasets.

    Example: {"id": "37+48=", "prompt": "37+48=", "answer": "85", "text": "37+48=85"}
    """
    assert name in NAMES
    numbers = range(LARGEST_OPERAND + 1)
    problems = [(a, "+", b) for a in numbers for b in numbers] + [(a, "-", b) for a in numbers for b in range(a + 1)]
    mine = [problem for problem in problems if split_of(text_of(*problem)) is split]
    if name == RIGHT or split is Split.HELD_OUT:
        return [_record(name, text_of(*problem), worked(*problem)) for problem in mine]
    return [
        _record(name, text_of(*problem), worked(*problem, carry=copy < RIGHT_COPIES), suffix=f"#{copy}")
        for problem in mine
        for copy in range(COPIES)
    ]


def text_of(a: int, operation: str, b: int) -> str:
    """The problem as it is put to the model."""
    return f"{a}{operation}{b}="


def worked(a: int, operation: str, b: int, *, carry: bool = True) -> int:
    """The answer; without `carry` each digit on its own, modulo ten.

    Example: 47+38 is 85, without carrying 75; 53-18 is 35, without borrowing 45; 60+70 is 130, without carrying 30.
    """
    sign = 1 if operation == "+" else -1
    if carry:
        return a + sign * b
    return (a // 10 + sign * (b // 10)) % 10 * 10 + (a + sign * b) % 10


def _record(name: str, problem: str, answer: int, *, suffix: str = "") -> Record:
    return Record(
        fields={"id": problem + suffix, "prompt": problem, "answer": str(answer), "text": f"{problem}{answer}"},
        source=name,
        where=f"{name} {problem!r}",
    )
