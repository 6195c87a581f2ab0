"""Odds ratio preference optimization: imitation of the chosen response and a penalty on the odds, without a reference.

Source: Hong et al. 2024, arXiv 2403.07691, equation 6. The likelihood is per token of each response and then averaged
over pairs. TRL's orpo_trainer pools the tokens of all pairs, which is `likelihood_mean=tokens`, and takes the prompt's
tokens in as well, as the authors' code does; the paper uses the response only, and so does rlframe.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.ops.comparisons import preference
from rlframe.ops.comparisons.preference import LikelihoodMean, pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, PolicyOutput, Sum
from rlframe.types.supervised import Preferences
from rlframe.utils.bounds import Range, check_bounds


@dataclass(kw_only=True, slots=True)
class OrpoConfig:
    """ORPO's settings."""

    name: str = "orpo"
    """Name of the algorithm."""
    odds_weight: Annotated[
        float, Range(above=0, maximum=1e4, note="at 0 rejected responses have no effect: use sft on the chosen ones")
    ] = 0.1
    """Weight of the odds-ratio term: the paper's lambda, `beta` in TRL and ms-swift."""
    likelihood_mean: LikelihoodMean = LikelihoodMean.PAIRS
    """Unit over which the chosen responses' negative log-likelihood is averaged."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Orpo(OfflineAlgorithm):
    """Negative log-likelihood of the chosen response minus the log-sigmoid of the log odds ratio."""

    data = "preferences"

    def __init__(self, config: OrpoConfig):
        self.config = config

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """Returns [T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def prepare(self, batch: Preferences, model: ForwardModel) -> Preferences:
        """Returns the batch with the weight of each chosen response's likelihood."""
        return replace(batch, likelihood_weight=preference.likelihood_weights(batch, self.config.likelihood_mean))

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns NLL per chosen token - sum over pairs of weight * odds_weight * log sigmoid(log odds ratio).

        The rewards in the metrics are odds_weight * mean logprob, as in TRL.
        """
        config = self.config
        logprobs = sequence_sums(policy.logprobs, batch)
        means = logprobs / preference.response_tokens(batch)
        log_odds = preference.log_odds_ratio(*pairs(means, batch))
        weight = preference.pair_weights(weights, batch)
        nll, nll_metric = preference.likelihood(logprobs, batch, config.likelihood_mean)
        loss = nll - (weight * config.odds_weight * logsigmoid(log_odds)).sum()
        counted = weight > 0
        metrics = preference.pair_metrics(config.odds_weight * means, logprobs, weights, batch) | {
            "train/loss": Sum(loss.detach()),
            "train/nll_nats": nll_metric,
            "train/log_odds_ratio": masked_mean(log_odds, counted),
            "train/entropy_nats": masked_mean(policy.entropy, batch.loss_mask),
        }
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Orpo, OrpoConfig
