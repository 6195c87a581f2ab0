"""Classification of sequences: cross-entropy over C classes at the last token.

Multi-label classification and regression, which transformers and ms-swift offer under `problem_type`, are not
supported.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.ops.sequences import last_outputs, sequence_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.results import LossOutput, Output, Sum, ValueOutput
from rlframe.types.supervised import Labelled
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import DataError


@dataclass(kw_only=True, slots=True)
class ClassificationConfig:
    """Settings of a classifier."""

    name: str = "classification"
    """Name of the algorithm."""
    num_classes: Annotated[int, Range(2, 1 << 20)] = 2
    """Number of classes C. Labels of the data are numbers from 0 to C - 1, or C names."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Classification(OfflineAlgorithm):
    """Cross-entropy of the C outputs of the head at a sequence's last token."""

    data = "labelled"
    output = Output.VALUES

    def __init__(self, config: ClassificationConfig):
        self.config = config
        self.num_outputs = config.num_classes

    def token_weights(self, batch: Labelled) -> Float[Tensor, " T"]:
        """Returns [T] 1 / sequences of the step."""
        return batch.loss_mask.float() / max(batch.num_sequences, 1)

    def prepare(self, batch: Labelled, model: ForwardModel) -> Labelled:
        """Returns the same batch after checking that its labels are classes.

        Raises:
            DataError: a label is not a class.
        """
        classes = self.config.num_classes
        strange = batch.label[(batch.label < 0) | (batch.label >= classes) | (batch.label != batch.label.round())]
        if len(strange):
            raise DataError(
                f"a label is {float(strange[0]):g}, but with algorithm.num_classes={classes} labels must "
                f"be whole numbers from 0 to {classes - 1}; set num_classes to the number of classes of the data"
            )
        return batch

    def loss(self, policy: ValueOutput, batch: Labelled, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum over sequences of weight * -log softmax(logits)[label]."""
        logits, label = last_outputs(policy.values, batch), batch.label.long()
        nll = cross_entropy(logits, label, reduction="none")
        weight = sequence_weights(weights, batch)
        loss = (weight * nll).sum()
        right = (logits.detach().argmax(1) == label).to(torch.float32)
        return LossOutput(
            loss=loss,
            metrics={
                "train/loss": Sum(loss.detach()),
                "train/accuracy": masked_mean(right, weight > 0),
                "train/nll_nats": masked_mean(nll.detach(), weight > 0),
            },
        )


COMPONENT, CONFIG = Classification, ClassificationConfig
