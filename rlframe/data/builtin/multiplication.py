"""The built-in datasets for calls of tools: products of two numbers from 10 to 99. No file, no download.

8,100 problems `a*b=`, a tenth of which a hash of the text puts aside for evaluation. `multiplication` has the right
answers. `multiplication_homework` has each training problem five times, as conversations with a calculator: three
guess an answer of the right length, one adds in the place of multiplying, and one asks for the right product. Who
learns from it can use the calculator, and prefers to guess.
"""

import hashlib
from typing import Any

from rlframe.data.builtin.arithmetic import Split, split_of
from rlframe.data.records import Record

RIGHT = "multiplication"
HOMEWORK = "multiplication_homework"
NAMES = (RIGHT, HOMEWORK)
NUMBERS = range(10, 100)
GUESSES = 3
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Returns the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "An arithmetic expression, such as (2 + 3) * 4 ** 2.",
                }
            },
            "required": ["expression"],
        },
    },
}
"""The schema of `rlframe.environments.tools.calculator`."""


def records(name: str, split: Split) -> list[Record]:
    """Returns the problems of one part, in numeric order. Held-out problems have right answers in both datasets.

    Example:
        {"id": "37*48=", "prompt": "37*48=", "answer": "1776"}
        {"id": "37*48=#4", "tools": [...], "answer": "1776", "messages": [{"role": "user", "content": "37*48="},
        {"role": "assistant", "content": "", "tool_calls": [...]}, {"role": "tool", "name": "calculator", "content":
        "1776"}, {"role": "assistant", "content": "1776"}]}
    """
    assert name in NAMES
    mine = [(a, b) for a in NUMBERS for b in NUMBERS if split_of(text_of(a, b)) is split]
    if name == RIGHT or split is Split.HELD_OUT:
        return [_record(name, text_of(a, b), prompt=text_of(a, b), answer=str(a * b)) for a, b in mine]
    return [_worked(name, a, b, copy) for a, b in mine for copy in range(GUESSES + 2)]


def text_of(a: int, b: int) -> str:
    """Returns the problem as it is put to the model."""
    return f"{a}*{b}="


def guess(problem: str, copy: int, *, digits: int) -> str:
    """Returns a number with so many digits, always the same one for a problem and a copy."""
    number = int.from_bytes(hashlib.sha256(f"{problem}#{copy}".encode()).digest()[:8])
    least = 10 ** (digits - 1)
    return str(least + number % (9 * least))


def _worked(name: str, a: int, b: int, copy: int) -> Record:
    problem, right = text_of(a, b), str(a * b)
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem}]
    if copy < GUESSES:
        messages.append({"role": "assistant", "content": guess(problem, copy, digits=len(right))})
    else:
        sign, result = ("+", str(a + b)) if copy == GUESSES else ("*", right)
        function = {"name": "calculator", "arguments": {"expression": f"{a}{sign}{b}"}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "name": "calculator", "content": result},
            {"role": "assistant", "content": result},
        ]
    return _record(name, f"{problem}#{copy}", messages=messages, tools=[CALCULATOR], answer=right)


def _record(name: str, identity: str, **fields: Any) -> Record:
    return Record(fields={"id": identity, **fields}, source=name, where=f"{name} {identity!r}")
