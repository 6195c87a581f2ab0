"""The last number: 1 if the last number of the response is the answer, else 0."""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import RewardError

MINUS = "\u2212"
"""The minus that is no hyphen, as typography has it."""
COMMA = r"(?:,|\\,|[\u00a0\u2009\u202f])"
"""Pattern of what stands between thousands: a comma, or a narrow space of LaTeX or of typography, as gpt-oss writes."""
NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-{MINUS}])?"
    rf"(?:(?:[0-9]{{1,3}}(?:{COMMA}[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
"""Pattern of a number. A minus is its sign, unless it follows what one can subtract from. A point is part of it, unless
it ends a word."""


@dataclass(kw_only=True, slots=True)
class LastNumberConfig:
    """No settings. Commas and narrow spaces between thousands, and zeros that change nothing, are ignored: `1,250.0` is
    1250."""


class LastNumber(Reward):
    """1.0 when the last number of the response equals the answer, else 0.0: for models that answer in sentences."""

    needs_answer = True

    def __init__(self, config: LastNumberConfig):
        pass

    def score(self, attempt: Attempt) -> float:
        """Returns 1.0 or 0.0. Raises RewardError if there is no answer, or if it is no number."""
        answer = attempt.required_answer()
        try:
            right = _decimal(answer.strip())
        except InvalidOperation as error:
            raise RewardError(f"the answer must be a number, got {answer!r:.60}") from error
        found = _last_number(attempt)
        return float(found is not None and found == right)

    def extract(self, attempt: Attempt) -> str | None:
        """Returns the last number without what changes nothing."""
        found = _last_number(attempt)
        return None if found is None else f"{found.normalize() + 0:f}"


def _last_number(attempt: Attempt) -> Decimal | None:
    numbers = NUMBER.findall(attempt.response_text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(COMMA, "", text).replace(MINUS, "-"))


COMPONENT, CONFIG = LastNumber, LastNumberConfig
