"""The report of one publish."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """Report of one publish."""

    version: int
    transport: str
    """Name of the transport, such as `shm`, or `reload over nccl`."""
    num_bytes: int
    """Bytes read from sources, over all destination ranks."""
    pause_s: float
    """Seconds in which engines could not sample, from the closing of the first engine's gate until all were open
    again."""
    pull_s: float
    """Seconds until the slowest rank had its pieces."""
    verify_s: float
    """Seconds of the slowest rank's digests, and of their comparison."""
    total_s: float
