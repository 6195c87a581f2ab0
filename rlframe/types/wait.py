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

    def __str__(self) -> str:
        if self.number == 1:
            return f"1 attempt waits for {self.what}, {self.longest_s:.0f} s so far ({self.limit})"
        return f"{self.number} attempts wait for {self.what}, up to {self.longest_s:.0f} s so far ({self.limit})"
