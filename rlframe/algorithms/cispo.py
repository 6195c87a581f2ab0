"""Clipped importance-sampling policy optimization.

Source: MiniMax 2025, arXiv 2506.13585, equations 4 and 5: the importance ratio is a clipped weight without gradient, so
that no token loses its own. Bounds are written as everywhere here, 1 - clip_low and 1 + clip_high; TRL and ms-swift
call the cap itself epsilon_high, so that their 5.0 is `clip_high: 4.0`. verl's default bounds are PPO's, 0.8 and 1.2.
With `correction.bypass` the weight is the token's ratio to the engine: verl's bypass with `loss_type: reinforce` and
`rollout_is: token`.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import GroupNormalized, PolicyGradient, PolicyGradientConfig, check_groups
from rlframe.ops.surrogate import masked_mean, truncated_weight_surrogate
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range


@dataclass(kw_only=True, slots=True)
class CispoConfig(GroupNormalized, PolicyGradientConfig):
    """CISPO's settings."""

    name: str = "cispo"
    """Name of the algorithm."""
    clip_low: Annotated[float, Range(0, 1, note="the weight is at least 1 - clip_low")] = 1.0
    """Lower bound of the weight is 1 - clip_low. 1.0 means no lower bound, as in the paper."""
    clip_high: Annotated[float, Range(0, 1e9, note="the weight is at most 1 + clip_high")] = 4.0
    """Upper bound of the weight is 1 + clip_high. 4.0 caps it at 5 (ScaleRL, arXiv 2510.13786)."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_groups(self)


class Cispo(PolicyGradient[CispoConfig]):
    """Policy gradient weighted by the clipped importance ratio."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] -weight * advantage * logprob."""
        config = self.config
        token_loss, clipped = truncated_weight_surrogate(
            logprobs, old_logprobs, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


COMPONENT, CONFIG = Cispo, CispoConfig
