"""Clipped importance-sampling policy optimization.

Source: MiniMax 2025, arXiv 2506.13585, equations 4 and 5: the importance ratio is a clipped weight without gradient, so
that no token loses its own. Bounds are written as everywhere here, 1 - clip_low and 1 + clip_high; other frameworks
call the cap itself epsilon_high, so that their 5.0 is `clip_high: 4.0`.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig
from rlframe.ops.surrogate import masked_mean, truncated_weight_surrogate
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric


@dataclass(kw_only=True, slots=True)
class CispoConfig(PolicyGradientConfig):
    """CISPO's settings."""

    name: str = "cispo"
    """The algorithm."""
    clip_low: float = 1.0
    """The weight is at least 1 - this; 1.0 is no lower bound, as in the paper."""
    clip_high: float = 4.0
    """The weight is at most 1 + this: 4.0 caps it at 5 (ScaleRL, arXiv 2510.13786)."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        self.needs_groups()
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must lie in [0, 1], got {self.clip_low}: the weight is at least 1 - clip_low")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}: the weight is at most 1 + clip_high")


class Cispo(PolicyGradient[CispoConfig]):
    """Policy gradient weighted by the clipped importance ratio."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """[T] -weight * advantage * logprob."""
        config = self.config
        token_loss, clipped = truncated_weight_surrogate(
            logprobs, old_logprobs, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


COMPONENT, CONFIG = Cispo, CispoConfig
