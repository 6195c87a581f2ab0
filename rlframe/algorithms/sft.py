"""Supervised fine-tuning: negative log-likelihood of the assistant's tokens."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, PolicyOutput, Sum


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """Supervised fine-tuning's settings."""

    name: str = "sft"
    """The algorithm."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""

    def __post_init__(self) -> None:
        if self.aggregation in (Aggregation.PROMPT_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM):
            raise ValueError(f"aggregation {self.aggregation} is for rollouts, not for sft; use token_mean")


class Sft(OfflineAlgorithm):
    """Cross-entropy on the tokens that the loss mask names."""

    def __init__(self, config: SftConfig):
        self.config = config

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """[T] by `aggregation`."""
        return token_weights(batch, self.config.aggregation)

    def loss(self, policy: PolicyOutput, batch: Sequences, weights: Float[Tensor, " T"]) -> LossOutput:
        """-sum weights * logprob."""
        loss = -(weights * policy.logprobs).sum()
        metrics = {
            "train/loss": Sum(float(loss.detach())),
            "train/nll_nats": masked_mean(-policy.logprobs, batch.loss_mask),
            "train/entropy_nats": masked_mean(policy.entropy, batch.loss_mask),
        }
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Sft, SftConfig
