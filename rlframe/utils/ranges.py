"""Ranges of numeric settings. NaN lies in none of them, and what could only overflow is refused with the rest."""

LARGEST = 1e6
"""Upper bound of settings that have no other: products of larger ones leave the range in which float32 is useful."""


def above(name: str, value: float, low: float = 0, *, why: str = "") -> None:
    """Raises a ValueError unless `value` lies in (low, LARGEST].

    Args:
        name: of the field.
        why: ends the message.
    """
    if not value > low:
        raise ValueError(f"{name} must be above {low:g}, got {value}{why}")
    _bounded(name, value)


def at_least(name: str, value: float, low: float = 0, *, why: str = "") -> None:
    """Raises a ValueError unless `value` lies in [low, LARGEST]; see `above`."""
    if not value >= low:
        raise ValueError(f"{name} must be at least {low:g}, got {value}{why}")
    _bounded(name, value)


def _bounded(name: str, value: float) -> None:
    if value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST:g}, got {value}")
