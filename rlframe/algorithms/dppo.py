"""Divergence proximal policy optimization.

Source: arXiv 2602.04879, binary total variation and binary KL: a token has no gradient once its probability has moved
too far in the direction of its advantage, whatever its ratio, so that rare tokens are not clipped for small movements
and likely ones not left free. As in verl's dppo_tv and dppo_kl the ratio is a capped weight without gradient. The paper
bounds the movement from the engine's policy: `correction.bypass`.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import GroupNormalized, PolicyGradient, PolicyGradientConfig, check_groups
from rlframe.ops.surrogate import Trust, masked_mean, trusted_surrogate
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class DppoConfig(GroupNormalized, PolicyGradientConfig):
    """DPPO's settings."""

    name: str = "dppo"
    """The algorithm."""
    divergence: Trust = Trust.TV
    """What is bounded: the movement of the token's probability, or nats."""
    limit_low: Annotated[float, Range(above=0, maximum=1e3)] = 0.2
    """A token with an advantage of 0 or less that has become unlikelier by more has no gradient (verl's
    clip_ratio_low)."""
    limit_high: Annotated[float, Range(above=0, maximum=1e3)] = 0.2
    """A token with an advantage above 0 that has become likelier by more has no gradient (verl's clip_ratio_high)."""
    ratio_cap: Annotated[float, Range(1, 1e9)] = 20.0
    """The ratio counts as this at most: 20 in the paper's recommendation of a large one, section 5.4; verl's
    clip_ratio_c is 3 unless changed."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_groups(self)
        for name in ("limit_low", "limit_high"):
            if self.divergence is Trust.TV and getattr(self, name) > 1:
                raise SettingError(name, "must be at most 1 with divergence=tv", got=getattr(self, name))


class Dppo(PolicyGradient[DppoConfig]):
    """Policy gradient that stops where the policy has moved far enough."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] -capped ratio * advantage * logprob, 0 beyond the limits."""
        config = self.config
        token_loss, beyond = trusted_surrogate(
            logprobs,
            old_logprobs,
            batch.advantages,
            trust=config.divergence,
            limit_low=config.limit_low,
            limit_high=config.limit_high,
            ratio_cap=config.ratio_cap,
        )
        return token_loss, {"train/clip_fraction": masked_mean(beyond.float(), batch.loss_mask)}


COMPONENT, CONFIG = Dppo, DppoConfig
