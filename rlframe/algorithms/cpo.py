"""Contrastive preference optimization: DPO without a reference, and imitation of the chosen response.

Source: Xu et al. 2024, arXiv 2401.08417, equation 3 and what follows it. TRL's CPOTrainer pools the tokens of all
chosen responses in the likelihood, which is `likelihood_mean=tokens`; its loss_type=simpo, which makes CPO-SimPO, is
algorithm.name=simpo with `nll_coefficient`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.ops.comparisons import preference
from rlframe.ops.comparisons.preference import PAIR_LOSSES, LikelihoodMean, LogRatios, PairLoss, PairSettings, pairs
from rlframe.ops.sequences import sequence_sums
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, PolicyOutput, Sum
from rlframe.types.supervised import Preferences
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


class CpoLoss(StrEnum):
    """The losses of `PairLoss` with the same names, relative to a reference under which all responses are equally
    likely."""

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO_MEAN = "ipo_mean"


@dataclass(kw_only=True, slots=True)
class CpoConfig:
    """CPO's settings."""

    name: str = "cpo"
    """Name of the algorithm."""
    loss: CpoLoss = CpoLoss.SIGMOID
    """The loss of a pair."""
    beta: Annotated[float, Range(above=0, maximum=1e4, note="at 0 rejected responses have no effect")] = 0.1
    """Scale of the rewards: beta * logprob of a response."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Probability that chosen and rejected are swapped."""
    nll_coefficient: Annotated[float, Range(0, 1e4)] = 1.0
    """Weight of the chosen response's negative log-likelihood per token, called `cpo_alpha` elsewhere. 0 disables
    it."""
    likelihood_mean: LikelihoodMean = LikelihoodMean.PAIRS
    """Unit over which nll_coefficient's likelihood is averaged."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.label_smoothing and self.loss is not CpoLoss.SIGMOID:
            raise SettingError(
                "label_smoothing",
                f"has no effect with loss={self.loss}",
                got=self.label_smoothing,
                hint="remove it, or use sigmoid",
            )
        preference.check_likelihood(self.nll_coefficient, self.likelihood_mean)


class Cpo(OfflineAlgorithm):
    """A loss of the margin between two logprobs, and the likelihood of the chosen response."""

    data = "preferences"

    def __init__(self, config: CpoConfig):
        self.config = config

    def token_weights(self, batch: Preferences) -> Float[Tensor, " T"]:
        """Returns [T] 1 / pairs of the step."""
        return preference.pair_token_weights(batch)

    def prepare(self, batch: Preferences, model: ForwardModel) -> Preferences:
        """Returns the batch with the weight of each chosen response's likelihood, if it has any."""
        return preference.with_likelihood(batch, self.config.nll_coefficient, self.config.likelihood_mean)

    def loss(self, policy: PolicyOutput, batch: Preferences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over pairs of weight * loss, and nll_coefficient * negative log-likelihood per chosen
        token."""
        config = self.config
        logprobs = sequence_sums(policy.logprobs, batch)
        chosen, rejected = pairs(logprobs, batch)
        chosen_tokens, rejected_tokens = pairs(preference.response_tokens(batch), batch)
        of_pair = PAIR_LOSSES[PairLoss(config.loss)](
            LogRatios(chosen=chosen, rejected=rejected, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens),
            PairSettings(beta=config.beta, label_smoothing=config.label_smoothing),
        )
        loss = (preference.pair_weights(weights, batch) * of_pair).sum()
        metrics = preference.pair_metrics(config.beta * logprobs, logprobs, weights, batch)
        if config.nll_coefficient:
            nll, metrics["train/nll_nats"] = preference.likelihood(logprobs, batch, config.likelihood_mean)
            loss = loss + config.nll_coefficient * nll
        metrics["train/loss"] = Sum(loss.detach())
        metrics["train/entropy_nats"] = masked_mean(policy.entropy, batch.loss_mask)
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Cpo, CpoConfig
