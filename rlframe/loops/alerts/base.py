"""The base of alerts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

Config = TypeVar("Config")
PAGE = "docs/metrics.md#alerts"


class Alert(ABC, Generic[Config]):
    """Looks at the metrics of each step and says when something is wrong: derive from it, with a dataclass of settings,
    and define `look`.

    Example:
        >>> @dataclass
        >>> class Settings:
        >>>     least: float = 0.2
        >>>
        >>> class Unformatted(Alert[Settings]):
        >>>     def look(self, step, metrics):
        >>>         value = metrics.get("reward/format_mean", 1.0)
        >>>         return f"reward/format_mean is {value:.3g}, below {self.config.least}" \
        >>>             if value < self.config.least else None
    """

    page: ClassVar[str] = PAGE
    """Page that says what to do."""

    def __init__(self, config: Config):
        self.config = config

    @abstractmethod
    def look(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Returns a sentence with the value, the threshold and what to look at; None if nothing is wrong.

        Called after each step, in order. A resumed run calls it with the steps that were done before, so that it knows
        what it would have known.

        Args:
            metrics: what metrics.jsonl has of the step.
        """
