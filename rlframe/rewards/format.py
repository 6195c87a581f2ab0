"""Format: 1 if the response has the required form, else 0."""

import re
from dataclasses import dataclass

from rlframe.rewards.base import Attempt, Reward
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class FormatConfig:
    """The required form."""

    pattern: str
    r"""Regular expression that is searched anywhere in the response. `.` also matches newlines. Anchor it with \A and
    \Z."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SettingError(
                "pattern", "must be a regular expression", got=repr(self.pattern), why=f"{error}"
            ) from error


class Format(Reward):
    """1.0 when the pattern is found in the response, else 0.0."""

    def __init__(self, config: FormatConfig):
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def score(self, attempt: Attempt) -> float:
        """Returns 1.0 or 0.0."""
        return float(self._pattern.search(attempt.response_text) is not None)


COMPONENT, CONFIG = Format, FormatConfig
