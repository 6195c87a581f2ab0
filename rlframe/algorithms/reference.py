"""Settings of the frozen reference: when its logprobs are computed, and how it follows the policy."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError

MIX = 0.6
"""Default mix, as in TRL and in the paper's experiments."""


class ReferenceSource(StrEnum):
    """The time at which the reference's logprobs are computed."""

    LIVE = "live"
    """In each step, by a forward pass of the frozen weights. The ranks hold a second copy of the weights in host
    memory."""
    PRECOMPUTED = "precomputed"
    """In one pass over all data before training, kept in the run's folder. The ranks hold no second copy."""


@dataclass(kw_only=True, slots=True)
class ReferenceUpdateConfig:
    """Settings of a reference that follows the policy.

    Source: Gorbatovski et al. 2024, arXiv 2404.09656 (TR-DPO), its soft and its hard update. Its tau counts optimizer
    steps, as TRL's `ref_model_sync_steps` does; `every_steps` counts steps of the run that train the policy, the same
    unless train.num_minibatches or train.epochs_per_batch is above 1.
    """

    every_steps: Annotated[int, Range(0, 10**9, note="0: never")] = 0
    """Number of steps of the run between two moves of the reference, those of a critic's warm-up left out. 0 keeps the
    weights of the start of the run."""
    mix: Annotated[float, Range(above=0, maximum=1)] = MIX
    """Fraction of the policy in the new reference: mix * policy + (1 - mix) * reference. 1 copies the policy (the
    paper's hard update). A float32 copy in host memory, next to the bfloat16 one, keeps small changes; TRL mixes in
    bfloat16."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.every_steps and self.mix != MIX:
            raise SettingError(
                "mix", "has no effect with every_steps=0", got=self.mix, hint="remove it, or set every_steps"
            )

    def check_live(self) -> None:
        """Raises a ValueError if the reference follows the policy, for algorithms that compute it before training."""
        if self.every_steps:
            raise SettingError(
                "reference_update.every_steps",
                "must be 0 with reference=precomputed",
                got=self.every_steps,
                why="logprobs computed before training cannot follow the policy",
                hint="use reference=live",
            )

    def due(self, first_step: int, count: int) -> bool:
        """Returns whether the reference moves after a batch of `count` optimizer steps that begins at optimizer step
        `first_step`."""
        period = self.every_steps * count
        return period > 0 and (first_step + count) // period > first_step // period
