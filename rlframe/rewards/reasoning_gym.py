"""The verifiers of reasoning-gym: how far a response solves its task, from 0 to 1."""

import re
from dataclasses import dataclass
from typing import Any

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import RewardError

FIELD = "reasoning_gym"
"""Field of the records of `data.path=reasoning_gym:NAME`."""


@dataclass(kw_only=True, slots=True)
class ReasoningGymConfig:
    """Settings of the answer's place."""

    tag: str = ""
    """Tag round the answer: with `answer`, what the last <answer>...</answer> of the response holds is scored, and 0
    given without one. Empty scores the whole response."""


class ReasoningGym(Reward):
    """The score of the task's own verifier."""

    def __init__(self, config: ReasoningGymConfig):
        # Optional: the extra `agents`.
        import reasoning_gym

        self._verifier: Any = reasoning_gym.get_score_answer_fn
        tag = re.escape(config.tag)
        self._pattern = re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL) if tag else None

    def score(self, attempt: Attempt) -> float:
        """Returns the verifier's score. Raises RewardError if the record is not one of reasoning-gym."""
        task = attempt.fields.get(FIELD)
        if not isinstance(task, dict):
            raise RewardError("the record is no task of reasoning-gym; use data.path=reasoning_gym:NAME")
        answer = self.extract(attempt)
        return 0.0 if answer is None else float(self._verifier(task["name"])(answer, task["entry"]))

    def extract(self, attempt: Attempt) -> str | None:
        """Returns what is scored."""
        answer = attempt.response_text.strip()
        if not self._pattern:
            return answer
        found = self._pattern.findall(answer)
        return found[-1].strip() if found else None


COMPONENT, CONFIG = ReasoningGym, ReasoningGymConfig
