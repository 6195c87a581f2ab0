"""EngineAdapter: the adapters that an engine is to compute with."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAdapter:
    """The adapters of the policy, whose values arrive by weight sync."""

    rank: int
    tensors: dict[str, tuple[int, ...]]
    """Shape of every A and B by PEFT's name."""
