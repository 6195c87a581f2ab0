"""Exact match: 1 if the response is the answer, else 0."""

from dataclasses import dataclass

from rlframe.rewards.base import Attempt, Reward


@dataclass(kw_only=True, slots=True)
class ExactMatchConfig:
    """Settings of the comparison. Surrounding white space never matters."""

    ignore_case: bool = False
    """Whether to ignore upper and lower case."""
    last_line: bool = False
    """Whether to compare only the response's last non-empty line."""


class ExactMatch(Reward):
    """1.0 when the response equals the answer, else 0.0."""

    needs_answer = True

    def __init__(self, config: ExactMatchConfig):
        self._config = config

    def score(self, attempt: Attempt) -> float:
        """Returns 1.0 or 0.0. Raises RewardError if there is no answer."""
        answer = attempt.required_answer().strip()
        return float(self.extract(attempt) == (answer.casefold() if self._config.ignore_case else answer))

    def extract(self, attempt: Attempt) -> str:
        """Returns what is compared with the answer."""
        response = attempt.response_text.strip()
        if self._config.last_line:
            response = response.rpartition("\n")[2].strip()
        return response.casefold() if self._config.ignore_case else response


COMPONENT, CONFIG = ExactMatch, ExactMatchConfig
