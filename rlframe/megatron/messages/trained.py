"""The report of a rank that has trained on a batch. Imports no megatron."""

from dataclasses import dataclass

from rlframe.types.results import UpdateResult
from rlframe.utils.process.memory import MemoryUse


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Result of a rank's optimizer steps."""

    steps: list[UpdateResult]
    """Result of each step."""
    seconds: float
    """Seconds that all steps took, until the device had done its work."""
    memory: MemoryUse
