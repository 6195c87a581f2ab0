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
    """Name of the algorithm."""
    divergence: Trust = Trust.TV
    """The bounded quantity: the change of the token's probability, or nats."""
    limit_low: Annotated[float, Range(above=0, maximum=1e3)] = 0.2
    """Bound for tokens with an advantage of 0 or less. A token that has become less likely by more has no gradient
    (verl's clip_ratio_low)."""
    limit_high: Annotated[float, Range(above=0, maximum=1e3)] = 0.2
    """Bound for tokens with a positive advantage. A token that has become more likely by more has no gradient (verl's
    clip_ratio_high)."""
    ratio_cap: Annotated[float, Range(1, 1e9)] = 20.0
    """Upper bound of the ratio. The paper recommends a large one, 20, in section 5.4; verl's default clip_ratio_c is
    3."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_groups(self)
        for name in ("limit_low", "limit_high"):
            if self.divergence is Trust.TV and getattr(self, name) > 1:
                raise SettingError(name, "must be at most 1 with divergence=tv", got=getattr(self, name))


class Dppo(PolicyGradient[DppoConfig]):
    """Policy gradient of tokens whose probability has not yet moved too far."""

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
