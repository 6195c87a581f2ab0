"""1 when the response is the answer, else 0."""

from dataclasses import dataclass

from rlframe.rewards.base import Attempt, Reward


@dataclass(kw_only=True, slots=True)
class ExactMatchConfig:
    """What counts as the same text. White space around it never matters."""

    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    last_line: bool = False
    """Compare only the response's last line that is not empty."""


class ExactMatch(Reward):
    """1.0 when the response equals the answer, else 0.0."""

    needs_answer = True

    def __init__(self, config: ExactMatchConfig):
        self._config = config

    def score(self, attempt: Attempt) -> float:
        """1.0 or 0.0. Raises RewardError when there is no answer."""
        response, answer = attempt.response_text.strip(), attempt.required_answer().strip()
        if self._config.last_line:
            response = response.rpartition("\n")[2].strip()
        if self._config.ignore_case:
            response, answer = response.casefold(), answer.casefold()
        return float(response == answer)


COMPONENT, CONFIG = ExactMatch, ExactMatchConfig
