"""Geometric-mean policy optimization.

Source: Zhao et al. 2025, arXiv 2507.20673: GRPO's advantages with the geometric mean of a rollout's token ratios, each
clipped in log space on the side that the advantage moves it to. It has the form of GSPO-token, so that what differs by
token (a teacher's credit, weights and masks) reaches its own token; verl and TRL (`experimental.gmpo`) take the mean
advantage of the rollout and the geometric mean of token weights. TRL leaves tokens below its top_entropy_quantile out
of the mean too. TRL takes its KL by the mean within rollouts, which
the default aggregation is.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import GroupNormalized, PolicyGradient, PolicyGradientConfig, check_groups
from rlframe.ops.aggregation import Aggregation
from rlframe.ops.surrogate import geometric_surrogate, masked_mean
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range


@dataclass(kw_only=True, slots=True)
class GmpoConfig(GroupNormalized, PolicyGradientConfig):
    """GMPO's settings."""

    name: str = "gmpo"
    """Name of the algorithm."""
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    """Rule by which token losses become one number. The paper's is the default; others weigh rollouts by their
    length."""
    clip_low: Annotated[float, Range(0, 20)] = 0.4
    """Lower bound of a token's log-ratio is -clip_low nats. The paper's 0.4 means a ratio of at least e^-0.4."""
    clip_high: Annotated[float, Range(0, 20)] = 0.4
    """Upper bound of a token's log-ratio, in nats."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_groups(self)


class Gmpo(PolicyGradient[GmpoConfig]):
    """Policy gradient with the geometric mean of clipped ratios."""

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] -geometric mean of the rollout's clipped ratios * advantage."""
        token_loss, clipped = geometric_surrogate(
            logprobs,
            old_logprobs,
            batch.advantages,
            batch,
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
        )
        return token_loss, {"train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask)}


COMPONENT, CONFIG = Gmpo, GmpoConfig
