"""The report of a rank on the host memory for a copy of its training state. Imports no megatron."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRoom:
    """Host memory that a rank needs, and what its host has."""

    needed_bytes: int
    """Bytes that the copy needs beyond those that the rank keeps for it already."""
    free_bytes: int
    """Bytes of the host's memory that processes can still have."""
