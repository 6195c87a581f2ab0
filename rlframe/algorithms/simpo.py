"""Simple preference optimization: rewards are mean logprobs, held apart by a margin, without a reference.

Source: Meng et al. 2024, arXiv 2405.14734, equation 6. `alpha` shapes the rewards as AlphaPO does, Gupta et al. 2025,
arXiv 2501.03884: r = beta (1 - p^-alpha) / alpha, p the geometric mean of the token probabilities; towards 0 it is
SimPO's. `nll_coefficient` adds the chosen response's likelihood, which makes it CPO-SimPO. TRL has all three in its
CPOTrainer with loss_type=simpo, where `gamma` is called simpo_gamma, 0.5 by default, and the likelihood's weight
cpo_alpha, 1 by default; its alpha also works with other losses, which no paper proposes.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.ops.comparisons import preference
from rlframe.ops.comparisons.f_divergence import FDivergence, scores
from rlframe.ops.comparisons.preference import LikelihoodMean, pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, PolicyOutput, Sum
from rlframe.types.supervised import Preferences
from rlframe.utils.bounds import Range, check_bounds


@dataclass(kw_only=True, slots=True)
class SimpoConfig:
    """SimPO's settings."""

    name: str = "simpo"
    """Name of the algorithm."""
    beta: Annotated[float, Range(above=0, maximum=1e4, note="at 0 the loss does not depend on the policy")] = 2.0
    """Scale of the rewards: beta * mean logprob of a response's tokens. The paper's lie between 2 and 2.5."""
    gamma: Annotated[float, Range(0, 1e4)] = 1.0
    """Margin by which the chosen reward must exceed the rejected one. The paper's lie between 0.3 and 1.6."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Probability that chosen and rejected are swapped."""

    alpha: Annotated[float, Range(-10, 10)] = 0.0
    """Shape of the rewards in AlphaPO: above 0 the more likely of two responses saturates, below 0 the less likely
    one."""
    nll_coefficient: Annotated[float, Range(0, 1e4)] = 0.0
    """Weight of the chosen response's negative log-likelihood per token. 0 disables it."""
    likelihood_mean: LikelihoodMean = LikelihoodMean.PAIRS
    """Unit over which nll_coefficient's likelihood is averaged."""

    def __post_init__(self) -> None:
        check_bounds(self)
        preference.check_likelihood(self.nll_coefficient, self.likelihood_mean)


class Simpo(OfflineAlgorithm):
    """Cross-entropy of the sign of the margin between two mean logprobs."""

    data = "preferences"

    def __init__(self, config: SimpoConfig):
        self.config = config

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """Returns [T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def prepare(self, batch: Preferences, model: ForwardModel) -> Preferences:
        """Returns the batch with the weight of each chosen response's likelihood, if it has any."""
        return preference.with_likelihood(batch, self.config.nll_coefficient, self.config.likelihood_mean)

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over pairs of weight * -log sigmoid(chosen reward - rejected reward - gamma), and
        nll_coefficient * negative log-likelihood per chosen token."""
        config = self.config
        logprobs = sequence_sums(policy.logprobs, batch)
        rewards = logprobs / preference.response_tokens(batch)
        if config.alpha:
            rewards = scores(rewards, FDivergence.ALPHA, alpha=config.alpha)
        rewards = config.beta * rewards
        chosen, rejected = pairs(rewards, batch)
        of_pair = preference.smoothed(chosen - rejected - config.gamma, config.label_smoothing)
        loss = (preference.pair_weights(weights, batch) * of_pair).sum()
        metrics = preference.pair_metrics(rewards, logprobs, weights, batch)
        if config.nll_coefficient:
            nll, metrics["train/nll_nats"] = preference.likelihood(logprobs, batch, config.likelihood_mean)
            loss = loss + config.nll_coefficient * nll
        metrics["train/loss"] = Sum(loss.detach())
        metrics["train/entropy_nats"] = masked_mean(policy.entropy, batch.loss_mask)
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Simpo, SimpoConfig
