"""1 when the response's final answer is mathematically the ground truth, else 0. The judging is math-verify's."""

import logging
from dataclasses import dataclass

from math_verify.grader import verify
from math_verify.parser import parse

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import RewardError

# It warns on every call that its own time limits are off. They are, on purpose: the reward runner limits the time, and
# theirs uses SIGALRM, which cannot interrupt code inside a C function.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANSWER_MARK = "####"


@dataclass(kw_only=True, slots=True)
class MathVerifyConfig:
    r"""Nothing to set: `#### 42`, `\boxed{42}`, `$42$` and a last plain number are all understood."""


class MathVerify(Reward):
    """1.0 when the response's final answer equals the ground truth, else 0.0.

    Source: https://github.com/huggingface/Math-Verify, 0.9.0.
    """

    needs_answer = True

    def __init__(self, config: MathVerifyConfig):
        pass

    def score(self, attempt: Attempt) -> float:
        """1.0 or 0.0. Raises RewardError when there is no answer, or one that is not mathematics."""
        answer = attempt.required_answer()
        gold = _parse(answer)
        if not gold:
            raise RewardError(f"the answer {answer!r} cannot be read as mathematics")
        return float(verify(gold, _parse(attempt.response_text), timeout_seconds=None))


def _parse(text: str) -> list:
    _, mark, after = text.rpartition(ANSWER_MARK)
    answer = after.strip().partition("\n")[0] if mark else text
    # None switches math-verify's own alarm off: the reward runner has a limit of its own, which also reaches code in C.
    return parse(answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


COMPONENT, CONFIG = MathVerify, MathVerifyConfig
