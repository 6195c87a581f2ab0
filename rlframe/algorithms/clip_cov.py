"""Clip-Cov: the clipped policy gradient without some of the tokens that reduce the entropy most.

Source: Cui et al. 2025, arXiv 2505.22617: among the tokens whose covariance of logprob and advantage lies within
bounds, a few random ones get no gradient. `ops.choice` explains how the draw is the same for every split. verl excludes
tokens stopped by its clip from the draw; those have no gradient anyway.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import (
    ClippedConfig,
    ClippedPolicyGradient,
    GroupNormalized,
    check_groups,
    sampled_logprobs,
)
from rlframe.ops.choice import covariances, drawn
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class ClipCovConfig(GroupNormalized, ClippedConfig):
    """Clip-Cov's settings."""

    name: str = "clip_cov"
    """Name of the algorithm."""
    chosen_fraction: Annotated[float, Range(above=0, maximum=1)] = 2e-4
    """Fraction of the batch's tokens in the loss that lose their gradient, rounded down but at least 1 token (the
    paper's r, verl's clip_cov_ratio)."""
    covariance_low: Annotated[float, Range(-1e9, 1e9)] = 1.0
    """Lower bound of the covariance of the tokens that are drawn from (verl's clip_cov_lb)."""
    covariance_high: Annotated[float, Range(-1e9, 1e9)] = 5.0
    """Upper bound of the covariance of the tokens that are drawn from (verl's clip_cov_ub)."""

    def __post_init__(self) -> None:
        ClippedConfig.__post_init__(self)
        check_groups(self)
        if self.covariance_low >= self.covariance_high:
            raise SettingError(
                "covariance_low", f"must be below covariance_high={self.covariance_high}", got=self.covariance_low
            )


class ClipCov(ClippedPolicyGradient[ClipCovConfig]):
    """Clipped policy gradient without the drawn tokens."""

    def marked(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with a mark on the tokens that lose their gradient."""
        config, logprobs = self.config, sampled_logprobs(batch)
        shares = covariances(logprobs, batch.advantages, batch.loss_mask)
        count = max(1, int(config.chosen_fraction * int(batch.loss_mask.sum())))
        candidates = (shares > config.covariance_low) & (shares < config.covariance_high)
        return replace(batch, chosen=drawn(candidates, count, token_ids=batch.token_ids, values=batch.rollout_logprobs))

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] PPO's surrogate, 0 at the drawn tokens."""
        assert batch.chosen is not None
        token_loss, metrics = super().surrogate(logprobs, old_logprobs, batch)
        chosen = masked_mean(batch.chosen.float(), batch.loss_mask)
        return token_loss.masked_fill(batch.chosen, 0.0), metrics | {"train/chosen_fraction": chosen}


COMPONENT, CONFIG = ClipCov, ClipCovConfig
