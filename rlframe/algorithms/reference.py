"""Where the logprobs of the frozen reference come from, and how it follows the policy."""

from dataclasses import dataclass
from enum import StrEnum

from rlframe.utils.ranges import at_least

MIX = 0.6
"""Of TRL; the paper's experiments."""


class ReferenceSource(StrEnum):
    """Where the reference's logprobs come from."""

    LIVE = "live"
    """A forward pass of the frozen weights in each step; the ranks hold a second copy of the weights in host memory."""
    PRECOMPUTED = "precomputed"
    """One pass over all data before training, kept in the run's folder; no second copy."""


@dataclass(kw_only=True, slots=True)
class ReferenceUpdateConfig:
    """How the reference follows the policy.

    Source: Gorbatovski et al. 2024, arXiv 2404.09656 (TR-DPO), its soft and its hard update. Its tau counts optimizer
    steps, as TRL's `ref_model_sync_steps` does; `every_steps` counts steps of the run, the same unless
    train.minibatches or train.epochs is above 1.
    """

    every_steps: int = 0
    """Move the reference after so many steps of the run; 0 keeps the weights that the run began with."""
    mix: float = MIX
    """It becomes mix * policy + (1 - mix) * itself, computed in float32 and rounded to the dtype of the weights: in
    bfloat16 a mix below about 0.01 is lost in the rounding. 1 copies the policy (the paper's hard update)."""

    def __post_init__(self) -> None:
        at_least("every_steps", self.every_steps)
        if not 0 < self.mix <= 1:
            raise ValueError(f"mix must lie in (0, 1], got {self.mix}")
        if not self.every_steps and self.mix != MIX:
            raise ValueError(f"mix has no effect with every_steps=0, got {self.mix}; remove it, or set every_steps")

    def check_live(self) -> None:
        """Raises a ValueError if the reference is to follow; for one that is computed before training."""
        if self.every_steps:
            raise ValueError(
                f"reference_update.every_steps must be 0 with reference=precomputed, got {self.every_steps}: what was "
                "computed before training cannot follow; use reference=live"
            )

    def due(self, first_step: int, count: int) -> bool:
        """Whether the reference moves after a batch of `count` optimizer steps, `first_step` of them having been taken
        before it."""
        period = self.every_steps * count
        return period > 0 and (first_step + count) // period > first_step // period
