"""Odds ratio preference optimization: imitation of the chosen response and a penalty on the odds, without a reference.

Source: Hong et al. 2024, arXiv 2403.07691, equation 6. The likelihood is per token of each response and then averaged
over pairs; TRL's orpo_trainer pools the tokens of all pairs instead.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.ops import preference
from rlframe.ops.preference import pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Mean, PolicyOutput, Sum
from rlframe.types.supervised import Preferences


@dataclass(kw_only=True, slots=True)
class OrpoConfig:
    """ORPO's settings."""

    name: str = "orpo"
    """The algorithm."""
    odds_weight: float = 0.1
    """Weight of the odds-ratio term, the paper's lambda."""

    def __post_init__(self) -> None:
        if self.odds_weight <= 0:
            raise ValueError(
                f"odds_weight must be above 0, got {self.odds_weight}: at 0 rejected responses count for nothing; use "
                "sft on the chosen ones"
            )


class Orpo(OfflineAlgorithm):
    """Negative log-likelihood of the chosen response minus the log-sigmoid of the log odds ratio."""

    data = "preferences"

    def __init__(self, config: OrpoConfig):
        self.config = config

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """[T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """sum over pairs of weight * (NLL per chosen token - odds_weight * log sigmoid(log odds ratio)).

        The rewards in the metrics are odds_weight * mean logprob, as in TRL.
        """
        logprobs = sequence_sums(policy.logprobs, batch)
        means = logprobs / preference.response_tokens(batch)
        chosen, rejected = pairs(means, batch)
        log_odds = preference.log_odds_ratio(chosen, rejected)
        weight = preference.pair_weights(weights, batch)
        loss = (weight * (-chosen - self.config.odds_weight * logsigmoid(log_odds))).sum()
        counted = weight > 0
        count = float(counted.sum())
        metrics = preference.pair_metrics(self.config.odds_weight * means, logprobs, weights, batch) | {
            "train/loss": Sum(float(loss.detach())),
            "train/nll_nats": Mean(float(-chosen.detach()[counted].sum()), count),
            "train/log_odds_ratio": Mean(float(log_odds.detach()[counted].sum()), count),
            "train/entropy_nats": masked_mean(policy.entropy, batch.loss_mask),
        }
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Orpo, OrpoConfig
