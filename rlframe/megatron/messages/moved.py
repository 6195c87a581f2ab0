"""What a sleeping policy tells its driver. Light: imports no megatron."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a sleep did on this rank, or undid."""

    kept_bytes: int
    """Copied to host memory: main weights and moments."""
    dropped_bytes: int
    """Given back without a copy: gradients, which the next step starts from zero."""
    seconds: float
