"""The built-in dataset of arithmetic in words, for pre-trained models: `What is 92 + 32?`. No file, no download.

16,452 questions about two numbers from 1 to 99: every ordered sum, every difference that is not negative, and every
product with a factor below 10. A hash of the text puts a tenth of them aside for evaluation. How to answer is left to
the model, so that a reward looks for the number (`reward=last_number`).
"""

from rlframe.data.builtin.arithmetic import Split, split_of
from rlframe.data.records import Record

NAME = "arithmetic_questions"
NUMBERS = range(1, 100)
SMALL = 10
"""Least factor of which there is only one in a product."""


def records(split: Split) -> list[Record]:
    """Returns the questions of one part: sums, differences, products, each in numeric order.

    Example:
        {"id": "What is 92 + 32?", "prompt": "What is 92 + 32?", "answer": "124"}
    """
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    problems = [(a, "+", b, a + b) for a, b in pairs]
    problems += [(a, "-", b, a - b) for a, b in pairs if a >= b]
    problems += [(a, "x", b, a * b) for a, b in pairs if min(a, b) < SMALL]
    questions = [(f"What is {a} {operation} {b}?", answer) for a, operation, b, answer in problems]
    return [_record(text, answer) for text, answer in questions if split_of(text) is split]


def _record(text: str, answer: int) -> Record:
    fields = {"id": text, "prompt": text, "answer": str(answer)}
    return Record(fields=fields, source=NAME, where=f"{NAME} {text!r}")
