"""Where the logprobs of the frozen reference come from, and how it follows the policy."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

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
    train.num_minibatches or train.epochs_per_batch is above 1.
    """

    every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 0
    """Move the reference after so many steps of the run; 0 keeps the weights that the run began with."""
    mix: Annotated[float, Range(above=0, maximum=1)] = MIX
    """It becomes mix * policy + (1 - mix) * itself; 1 copies the policy (the paper's hard update). It is kept in
    float32 in host memory, beside its copy in bfloat16, so that no small change is lost; TRL mixes in bfloat16."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.every_steps and self.mix != MIX:
            raise SettingError(
                "mix", "has no effect with every_steps=0", got=self.mix, hint="remove it, or set every_steps"
            )

    def check_live(self) -> None:
        """Raises a ValueError if the reference is to follow; for one that is computed before training."""
        if self.every_steps:
            raise SettingError(
                "reference_update.every_steps",
                "must be 0 with reference=precomputed",
                got=self.every_steps,
                why="what was computed before training cannot follow",
                hint="use reference=live",
            )

    def due(self, first_step: int, count: int) -> bool:
        """Whether the reference moves after a batch of `count` optimizer steps, `first_step` of them having been taken
        before it."""
        period = self.every_steps * count
        return period > 0 and (first_step + count) // period > first_step // period
