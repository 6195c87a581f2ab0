"""KL-Cov: the policy gradient without a clip, with a penalty on the tokens that reduce the entropy most.

Source: Cui et al. 2025, arXiv 2505.22617, with the authors' penalty, |log-ratio| to the policy before the update, as in
verl. Its gradient is 0 while that policy is the present one, so it needs several updates per batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.policy_gradient import (
    GroupNormalized,
    PolicyGradient,
    PolicyGradientConfig,
    check_groups,
    sampled_logprobs,
)
from rlframe.algorithms.requirements import RunFacts
from rlframe.ops.choice import covariances, greatest
from rlframe.ops.kl import MAX_LOG_RATIO
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import TrainBatch
from rlframe.types.results import Metric
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault


@dataclass(kw_only=True, slots=True)
class KlCovConfig(GroupNormalized, PolicyGradientConfig):
    """KL-Cov's settings."""

    name: str = "kl_cov"
    """Name of the algorithm."""
    chosen_fraction: Annotated[float, Range(above=0, maximum=1)] = 2e-4
    """Fraction of the batch's tokens in the loss that are penalised: those of the greatest covariance, rounded down but
    at least 1 token (the paper's k, verl's kl_cov_ratio)."""
    penalty_coefficient: Annotated[float, Range(above=0, maximum=1e4)] = 1.0
    """Weight of the penalty on them (the paper's beta, verl's ppo_kl_coef)."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        check_groups(self)
        if self.correction.normalize_weights:
            raise SettingError(
                "correction.normalize_weights",
                "is not supported by kl_cov, whose penalty it would not affect",
                got="true",
            )


class KlCov(PolicyGradient[KlCovConfig]):
    """Policy gradient with a penalty on the chosen tokens."""

    bounds_ratio = False

    def cross_faults(self, facts: RunFacts) -> Iterator[Fault]:
        """Yields those of every policy gradient, and that the penalty does nothing if there is one update."""
        yield from super().cross_faults(facts)
        if facts.one_update and not self.config.correction.bypass:
            yield Fault(
                "algorithm.name",
                f"has no effect with {facts.one_update}",
                got="kl_cov",
                why="the gradient of its penalty is 0 at the old policy",
                hint="use more minibatches or epochs, or algorithm.name=clip_cov",
                stated=True,
            )

    def marked(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with a mark on the penalised tokens."""
        shares = covariances(sampled_logprobs(batch), batch.advantages, batch.loss_mask)
        count = max(1, int(self.config.chosen_fraction * int(batch.loss_mask.sum())))
        return replace(batch, chosen=greatest(shares, count))

    def surrogate(
        self, logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"], batch: TrainBatch
    ) -> tuple[Float[Tensor, " T"], dict[str, Metric]]:
        """Returns [T] -ratio * advantage, plus penalty_coefficient * |log-ratio| at the chosen tokens."""
        assert batch.chosen is not None
        log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        penalty = self.config.penalty_coefficient * log_ratio.abs() * batch.chosen
        chosen = masked_mean(batch.chosen.float(), batch.loss_mask)
        return penalty - log_ratio.exp() * batch.advantages, {"train/chosen_fraction": chosen}


COMPONENT, CONFIG = KlCov, KlCovConfig
