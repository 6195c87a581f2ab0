"""The report of a sleeping policy to its driver. Imports no megatron."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Bytes that a sleep or a wake has moved on this rank."""

    kept_bytes: int
    """Bytes copied to host memory: main weights and moments."""
    dropped_bytes: int
    """Bytes given back without a copy: gradients, which the next step starts from zero."""
    stuck_bytes: int = 0
    """Bytes of the device that torch's allocator holds for no tensor: after a sleep, what it could not give back,
    because a tensor is left in the same block."""
    seconds: float
