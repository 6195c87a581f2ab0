"""Wait: attempts that wait for the same thing."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Attempts that wait for the same thing, which is no engine."""

    number: int
    """Number of the attempts."""
    what: str
    """Name of what they wait for, such as `reward.parts.format`."""
    longest_s: float
    """Seconds so far of the longest of their waits."""
    limit: str
    """Words about what limits such a wait, with the key of the setting."""

    @property
    def without_time(self) -> str:
        """The words about it that do not change while nothing happens."""
        return f"{self._who} ({self.limit})"

    @property
    def _who(self) -> str:
        who = "1 attempt waits" if self.number == 1 else f"{self.number} attempts wait"
        return f"{who} for {self.what}"

    def __str__(self) -> str:
        up_to = "" if self.number == 1 else "up to "
        return f"{self._who}, {up_to}{self.longest_s:.0f} s so far ({self.limit})"
