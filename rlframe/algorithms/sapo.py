"""Soft adaptive policy optimization.

Source: Gao et al. 2025, arXiv 2511.20347: GRPO's advantages with a smooth gate, a sigmoid of the ratio, in place of the
clip; it closes sooner for tokens with a negative advantage.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import GroupNormalized, PolicyGradient, PolicyGradientConfig, check_groups
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.surrogate import masked_mean, soft_gate_surrogate
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range


@dataclass(kw_only=True, slots=True)
class SapoConfig(GroupNormalized, PolicyGradientConfig):
    """SAPO's settings."""

    name: str = "sapo"
    """Name of the algorithm."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    """Rule by which token losses become one number."""
    temperature_positive: Annotated[float, Range(above=0, maximum=1e4)] = 1.0
    """Parameter tau for positive advantages: the greater it is, the sooner the gate closes away from ratio 1."""
    temperature_negative: Annotated[float, Range(above=0, maximum=1e4)] = 1.05
    """Parameter tau for other advantages."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_groups(self)


class Sapo(PolicyGradient[SapoConfig]):
    """Policy gradient through a soft gate on the ratio."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] -gate(ratio) * advantage."""
        token_loss, slope = soft_gate_surrogate(
            logprobs,
            old_logprobs,
            batch.advantages,
            temperature_positive=self.config.temperature_positive,
            temperature_negative=self.config.temperature_negative,
        )
        return token_loss, {"train/gate_slope": masked_mean(slope, batch.loss_mask)}


COMPONENT, CONFIG = Sapo, SapoConfig
