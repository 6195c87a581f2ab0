"""Mathematical equality: 1 if the response's final answer equals the ground truth, else 0. math-verify compares
them."""

import logging
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal

from latex2sympy2_extended.antlr_parser import PSParser
from math_verify.grader import verify
from math_verify.parser import parse

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import RewardError

# math-verify warns on every call that its own time limits are off. They are off on purpose: the runner limits the time,
# and math-verify's SIGALRM cannot interrupt code inside a C function.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_MARK = "####"
"""Precedes the final answer in its line, as in GSM8K. Markdown begins headings with the same."""
LONGEST_MARKED = 200
"""Greatest number of characters of an answer behind a mark."""
THOUGHTS = "</think>"
"""Ends the thoughts of a response."""
LATER = (r"\boxed", THOUGHTS)
"""Words that come after a final answer's mark only if it was none."""
DELIMITED = re.compile(r"(?<!\\)(?:\$|\\boxed|\\[(\[])")
"""Pattern of what begins LaTeX in a text."""
NUMBER = re.compile(r"-?[\d.\s/%]+")
"""Pattern of numbers that LaTeX would read otherwise than they are meant: `1 000`."""
MIXED = re.compile(r"(?<![\w.,/^)])(\d{1,3}(?:,\d{3})+|\d+) (\d{1,2})/(\d{1,2})(?![\w/^]|[.,]\d)")
"""Pattern of a whole number and a fraction, which math-verify reads as 1, and in LaTeX as a product."""
FRACTION = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e])")
"""Pattern of fractions of one character, and the digit before them."""
POWER = re.compile("(?<=[\\d)])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
"""Pattern of exponents in characters of their own."""
ROOT = re.compile(r"(?:\u221a|(?<![\\A-Za-z])sqrt)\s*(?:\((?P<group>[^()]*)\)|(?P<number>\d+(?:\.\d+)?))")
"""Pattern of a root that is not LaTeX."""
PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
NAMES = r"(ln|log|exp|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|csc|cot)"
"""Pattern of the names of functions."""
FUNCTION = re.compile(rf"(?<![\\A-Za-z.]){NAMES}(?=\s*[\d(\\_^]| [a-z]\b)")
"""Pattern of the name of a function that is not LaTeX, before what it is of."""
APPLIED = re.compile(
    rf"\\?(?<![A-Za-z.]){NAMES}\s+"
    r"(\d+(?:\.\d+)?)(?![\w^/*!]|\.\d| *[/^*])"
)
"""Pattern of a function of a number, which outside of LaTeX would be read as that number."""
SCIENTIFIC = re.compile(r"(?<![\w.,\\])(\d+\.\d+[eE][+-]?\d{1,2}|\d+[eE](?:[+-]0)?\d{1,2})(?![\w^]|\.\d)")
"""Pattern of a number with a power of ten. `2e-1` is none: it may be of Euler's number."""
THOUSANDS = re.compile("(?<=\\d)(?<!\\d{4})(?:\\\\[,:; ]|\\\\thinspace\\s*|[\u00a0\u2009\u202f])(?=\\d{3}(?!\\d))")
"""Pattern of the narrow spaces between thousands, of LaTeX and of typography, after which math-verify reads a factor or
another number."""
REPEATING = re.compile(r"(?<![\w.,])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d{1,20})\s*\}|(\d))")
"""Pattern of a decimal number whose last digits repeat, of which math-verify reads what comes before them."""
BOXED_POINT = re.compile(r"(?<=\d)\.(?=\s*\})")
"""Pattern of a point behind the number in a box, which math-verify then does not read."""
MINUS = re.compile("\u2212|\u2013(?=[\\d.\\\\])")
"""Pattern of a minus in a character of its own. A dash is one directly before a number."""
EITHER = re.compile(r"-?\d+[,:]\d+")
"""Pattern of what may be a pair or have a decimal comma, or be a ratio or a time: it is read as both."""
MEASURE = re.compile(r"[-+$]*\d[\d,]*(?:\.\d+)?(?: [A-Za-z ]+)?\.?")
"""Pattern of a number and its unit."""
COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Pattern of the letters of LaTeX that are no product of variables."""
WORD = re.compile(r"[A-Za-z]{2}")


def no_gamma(atom: object) -> None:
    """Does nothing: an atom of LaTeX is no gamma."""


# latex2sympy2_extended 1.11.0 asks every number in percent for FUNC_GAMMA, which its parser for antlr 4.9.3 lacks:
# math-verify then reads no percentage in LaTeX. Hydra needs that antlr. The name came with
# https://github.com/huggingface/latex2sympy2_extended/pull/2; this is over when that parser has it, as a test says.
if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    PSParser.AtomContext.FUNC_GAMMA = no_gamma  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(kw_only=True, slots=True)
class MathVerifyConfig:
    r"""No settings. `#### 42`, `\boxed{42}`, `$42$` and a last plain number are all recognised. The record's answer may
    be LaTeX without delimiters, such as `2\sqrt{3}`."""


class MathVerify(Reward):
    """1.0 when the response's final answer equals the ground truth, else 0.0.

    Source: https://github.com/huggingface/Math-Verify, 0.9.0.
    """

    needs_answer = True

    def __init__(self, config: MathVerifyConfig):
        pass

    def score(self, attempt: Attempt) -> float:
        """Returns 1.0 or 0.0. Raises RewardError if there is no answer, or if it is not mathematics."""
        answer = attempt.required_answer()
        written = _spelled_out(answer)
        gold = _marked(written) or _read(written)
        if not gold:
            raise RewardError(f"the answer {answer!r} cannot be read as mathematics")
        return float(verify(gold, _said(attempt.response_text), timeout_seconds=None))

    def extract(self, attempt: Attempt) -> str | None:
        """Returns the final answer as math-verify reads it, so that 1/2 and 2/4 are one, and 1/2 and 0.5 are two."""
        found = _said(attempt.response_text)
        return str(found[0]) if found else None


def _said(text: str) -> list:
    """Returns the final answer of a response, or nothing. What is in its thoughts counts if nothing follows them."""
    text = _spelled_out(text)
    _, ended, after = text.rpartition(THOUGHTS)
    found = _marked(after) or _parse(after) if ended else []
    return found or _marked(text) or _parse(text)


def _spelled_out(text: str) -> str:
    """Returns a text with its roots, powers, fractions, functions, minuses and pi as math-verify reads them. It reads 2
    of `2 sqrt(3)`, and of `ln 2`."""
    text = REPEATING.sub(_whole_fraction, BOXED_POINT.sub("", THOUSANDS.sub("", MINUS.sub("-", text))))
    text = SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", text)
    text = FUNCTION.sub(r"\\\1", APPLIED.sub(r"\\\1(\2)", text))
    text = ROOT.sub(lambda root: rf"\sqrt{{{root['group'] or root['number'] or ''}}}", text)
    text = POWER.sub(lambda power: f"^{{{_plain(power[0])}}}", text)
    text = FRACTION.sub(lambda found: f"{found[1]} {_plain(found[2])}" if found[1] else _plain(found[2]), text)
    return PI.sub(r"\\pi", MIXED.sub(_one_fraction, text))


def _plain(characters: str) -> str:
    return unicodedata.normalize("NFKC", characters).translate({0x2044: "/", 0x2212: "-"})


def _one_fraction(mixed: re.Match[str]) -> str:
    """Returns `7/2` for `3 1/2`. What is no number and a fraction below 1 stays."""
    whole, above, below = (int(each.replace(",", "")) for each in mixed.groups())
    return f"{whole * below + above}/{below}" if 0 < above < below else mixed[0]


def _whole_fraction(repeating: re.Match[str]) -> str:
    r"""Returns `\frac{1}{3}` for `0.\overline{3}`."""
    whole, before, several, one = repeating.groups(default="")
    again = several or one
    above = int(whole + before + again) - int(whole + before or "0")
    return rf"\frac{{{above}}}{{{(10 ** len(again) - 1) * 10 ** len(before)}}}"


def _marked(text: str) -> list:
    """Returns the answer behind the last ANSWER_MARK, or nothing if that is a heading, or the answer comes later."""
    _, mark, after = text.rpartition(ANSWER_MARK)
    line, _, rest = after.strip().partition("\n")
    if not mark or len(line) > LONGEST_MARKED or any(word in rest for word in LATER):
        return []
    is_mathematics = re.search(r"[\d\\]", line) and not WORD.search(COMMAND.sub("", line))
    is_last_number = MEASURE.fullmatch(line.strip()) and not rest
    return _read(line) if is_mathematics or is_last_number or r"\boxed" in line else []


def _read(answer: str) -> list:
    """Returns what an answer is, with or without the delimiters between which alone math-verify reads LaTeX."""
    answer = answer.strip().rstrip(".")
    is_prose = WORD.search(answer) and not re.search(r"[\\^{]", answer)
    if not (is_prose or DELIMITED.search(answer) or NUMBER.fullmatch(answer)):
        found = _parse(rf"\boxed{{{answer}}}")
        if found and not isinstance(found[0], str):
            return found + _parse(answer) if EITHER.fullmatch(answer) else found
    return _parse(answer)


def _parse(text: str) -> list:
    # None disables math-verify's own alarm: the runner has a limit of its own, which also covers C code.
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


COMPONENT, CONFIG = MathVerify, MathVerifyConfig
