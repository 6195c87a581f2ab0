"""The built-in datasets: sums and differences of two numbers from 0 to 99. No file, no download.

15,050 problems: `a+b=` for every ordered pair, and `a-b=` for a >= b, so that no answer is negative and every answer is
digits only. A hash of the text, not a seed, puts a tenth of them aside for evaluation.

`arithmetic` has the right answers. `arithmetic_homework` has each training problem three times, as a class might hand
it in: one copy right, two worked digit by digit without carrying or borrowing. Who learns from it knows both ways of
working and prefers the wrong one: the half-knowledge that the main job starts from. `arithmetic_preferences` prefers
the right answer to that without carrying, `arithmetic_unpaired` calls one of them desirable and the other not, and the
queries of `arithmetic_answers` belong to one of them and not to the other; all three have only the problems in which
the two differ. `arithmetic_carries` asks of every problem whether they do.
"""

import hashlib
from enum import StrEnum

from rlframe.data.records import Record

RIGHT = "arithmetic"
HOMEWORK = "arithmetic_homework"
PREFERENCES = "arithmetic_preferences"
UNPAIRED = "arithmetic_unpaired"
ANSWERS = "arithmetic_answers"
CARRIES = "arithmetic_carries"
FORMER_NAMES = {"arithmetic_judged": UNPAIRED}
NAMES = (RIGHT, HOMEWORK, PREFERENCES, UNPAIRED, ANSWERS, CARRIES)
LARGEST_OPERAND = 99
COPIES = 3
RIGHT_COPIES = 1


class Split(StrEnum):
    """The two parts of a dataset; together they are all of it."""

    TRAIN = "train"
    HELD_OUT = "held_out"


def split_of(problem: str) -> Split:
    """Returns which part a problem such as `37+48=` belongs to, now and always."""
    held_out = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8]) % 10 == 0
    return Split.HELD_OUT if held_out else Split.TRAIN


def records(name: str, split: Split) -> list[Record]:
    """Returns the problems of one part, sums before differences, in numeric order.

    Held-out problems have right answers in both of the datasets to imitate.

    Example:
        {"id": "37+48=", "prompt": "37+48=", "answer": "85", "text": "37+48=85"}
        {"id": "37+48=", "prompt": "37+48=", "chosen": "85", "rejected": "75"}
        {"id": "37+48=#False", "prompt": "37+48=", "completion": "75", "label": False}
        {"id": "37+48=", "query": "37+48=", "positive": "85", "negative": "75"}
        {"id": "37+48=", "text": "37+48=", "label": "carry"}
    """
    assert name in NAMES
    numbers = range(LARGEST_OPERAND + 1)
    problems = [(a, "+", b) for a in numbers for b in numbers] + [(a, "-", b) for a in numbers for b in range(a + 1)]
    mine = [problem for problem in problems if split_of(text_of(*problem)) is split]
    if name not in (RIGHT, HOMEWORK):
        return [record for problem in mine for record in _compared(name, *problem)]
    if name == RIGHT or split is Split.HELD_OUT:
        return [_answered(name, *problem) for problem in mine]
    return [
        _answered(name, *problem, suffix=f"#{copy}", carry=copy < RIGHT_COPIES)
        for problem in mine
        for copy in range(COPIES)
    ]


def text_of(a: int, operation: str, b: int) -> str:
    """Returns the problem as it is put to the model."""
    return f"{a}{operation}{b}="


def worked(a: int, operation: str, b: int, *, carry: bool = True) -> int:
    """Returns the answer; without `carry` each digit on its own, modulo ten.

    Example: 47+38 is 85, without carrying 75; 53-18 is 35, without borrowing 45; 60+70 is 130, without carrying 30.
    """
    sign = 1 if operation == "+" else -1
    if carry:
        return a + sign * b
    return (a // 10 + sign * (b // 10)) % 10 * 10 + (a + sign * b) % 10


def _compared(name: str, a: int, operation: str, b: int) -> list[Record]:
    """Returns the problem with its right answer against that without carrying; nothing where they are the same, unless
    that is what is asked."""
    problem, right, wrong = text_of(a, operation, b), *(worked(a, operation, b, carry=carry) for carry in (True, False))
    if name == CARRIES:
        return [_record(name, problem, key="text", label="plain" if right == wrong else "carry")]
    if right == wrong:
        return []
    if name == ANSWERS:
        return [_record(name, problem, key="query", positive=str(right), negative=str(wrong))]
    if name == PREFERENCES:
        return [_record(name, problem, chosen=str(right), rejected=str(wrong))]
    return [
        _record(name, problem, suffix=f"#{label}", completion=str(answer), label=label)
        for answer, label in ((right, True), (wrong, False))
    ]


def _answered(name: str, a: int, operation: str, b: int, *, suffix: str = "", carry: bool = True) -> Record:
    problem, answer = text_of(a, operation, b), worked(a, operation, b, carry=carry)
    return _record(name, problem, suffix=suffix, answer=str(answer), text=f"{problem}{answer}")


def _record(name: str, problem: str, *, suffix: str = "", key: str = "prompt", **fields: str | bool) -> Record:
    return Record(fields={"id": problem + suffix, key: problem, **fields}, source=name, where=f"{name} {problem!r}")
