"""Supervised fine-tuning and pre-training: negative log-likelihood of the tokens to imitate.

With `dft`, Dynamic Fine-Tuning: each token's loss is multiplied by its own probability, which takes no gradient.
Source: arXiv 2508.05629, the token-level objective; TRL 1.16's `loss_type="dft"` is the same.

Tokens are weighted by the importance that the data states, in numerator and denominator; ms-swift's loss_scale divides
by the number of tokens instead, so that with weights that average w its loss and gradients are w times as large. Label
smoothing (`label_smoothing_factor` of transformers) is not supported. TRL adds the router's auxiliary loss of a mixture
of experts by default, with the coefficient of the model's config; here it is train.moe.aux_loss_coefficient.
"""

from dataclasses import dataclass
from enum import StrEnum

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import OfflineAlgorithm
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, MeanIfAny, Metric, PolicyOutput, Sum
from rlframe.types.supervised import Examples
from rlframe.utils.errors import SettingError


class Imitated(StrEnum):
    """The data that is imitated."""

    EXAMPLES = "examples"
    """Conversations. Only the assistant's turns are trained on."""
    TEXTS = "texts"
    """Raw text, trained on as a whole: pre-training."""


@dataclass(kw_only=True, slots=True)
class SftConfig:
    """Supervised fine-tuning's settings."""

    name: str = "sft"
    """Name of the algorithm."""
    data: Imitated = Imitated.EXAMPLES
    """Kind of the records of data.path: conversations, or raw text for pre-training."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Rule by which token losses become one number."""
    dft: bool = False
    """Whether each token's loss is multiplied by its own probability, without gradient through it, so that unlikely
    tokens have no larger gradients than likely ones (Dynamic Fine-Tuning, arXiv 2508.05629)."""

    def __post_init__(self) -> None:
        if self.aggregation in (Aggregation.PROMPT_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM):
            raise SettingError("aggregation", f"{self.aggregation} is for rollouts, not for sft", hint="use token_mean")


class Sft(OfflineAlgorithm):
    """Cross-entropy of the tokens in the loss mask."""

    def __init__(self, config: SftConfig):
        self.config = config
        self.data = config.data.value

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] the weights by `aggregation`. Tokens are weighted by their importance if the data gives one."""
        importance = batch.importance if isinstance(batch, Examples) else None
        return token_weights(batch, self.config.aggregation, importance=importance)

    def loss(self, policy: PolicyOutput, batch: Sequences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns -sum of weights * logprob, or with `dft` -sum of weights * sg(probability) * logprob."""
        token_loss = -policy.logprobs
        if self.config.dft:
            token_loss = token_loss * policy.logprobs.detach().exp()
        loss = (weights * token_loss).sum()
        metrics: dict[str, Metric] = {
            "train/loss": Sum(loss.detach()),
            "train/nll_nats": masked_mean(-policy.logprobs, batch.loss_mask),
            "train/entropy_nats": masked_mean(policy.entropy, batch.loss_mask),
        }
        if isinstance(batch, Examples) and len(batch.channels) > 1:
            channel = batch.channel[batch.sequence_index()]
            for index, name in enumerate(batch.channels):
                counted = batch.loss_mask & (channel == index)
                metrics[f"train/nll_nats/{name}"] = masked_mean(-policy.logprobs, counted, MeanIfAny)
        return LossOutput(loss=loss, metrics=metrics)


COMPONENT, CONFIG = Sft, SftConfig
