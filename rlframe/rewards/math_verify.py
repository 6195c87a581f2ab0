"""Mathematical equality: 1 if the response's final answer equals the ground truth, else 0. math-verify compares
them."""

import logging
from dataclasses import dataclass

from math_verify.grader import verify
from math_verify.parser import parse

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import RewardError

# math-verify warns on every call that its own time limits are off. They are off on purpose: the runner limits the time,
# and math-verify's SIGALRM cannot interrupt code inside a C function.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_MARK = "####"


@dataclass(kw_only=True, slots=True)
class MathVerifyConfig:
    r"""No settings. `#### 42`, `\boxed{42}`, `$42$` and a last plain number are all recognised."""


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
        gold = _parse(answer)
        if not gold:
            raise RewardError(f"the answer {answer!r} cannot be read as mathematics")
        return float(verify(gold, _parse(attempt.response_text), timeout_seconds=None))

    def extract(self, attempt: Attempt) -> str | None:
        """Returns the final answer as math-verify reads it, so that 1/2 and 2/4 are one, and 1/2 and 0.5 are two."""
        found = _parse(attempt.response_text)
        return str(found[0]) if found else None


def _parse(text: str) -> list:
    _, mark, after = text.rpartition(ANSWER_MARK)
    answer = after.strip().partition("\n")[0] if mark else text
    # None disables math-verify's own alarm: the runner has a limit of its own, which also covers C code.
    return parse(answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


COMPONENT, CONFIG = MathVerify, MathVerifyConfig
