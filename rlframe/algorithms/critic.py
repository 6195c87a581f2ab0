"""The training of a critic, which is the same for all algorithms."""

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.base import Algorithm
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.gae import before_tokens, clipped_value_loss
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import Batch, Sequences
from rlframe.types.results import LossOutput, Output, Sum, ValueOutput


class Critic(Algorithm):
    """Regression of the returns on the states in which the tokens of the loss were chosen."""

    online = True
    output = Output.VALUES

    def __init__(self, *, aggregation: Aggregation, constant_length: int | None, clip: float | None):
        """
        Args:
            aggregation: how token losses become one number, with `constant_length` as in `token_weights`.
            clip: bound of the change of a value; see `clipped_value_loss`.
        """
        self.aggregation, self.constant_length, self.clip = aggregation, constant_length, clip

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] the weights by `aggregation`."""
        return token_weights(batch, self.aggregation, constant_length=self.constant_length)

    def loss(self, critic: ValueOutput, batch: Batch, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum of weights * clipped_value_loss, with the values of the states before the tokens."""
        assert batch.values is not None and batch.returns is not None
        values = before_tokens(critic.values[:, 0], batch)
        token_loss, clipped = clipped_value_loss(values, batch.values, batch.returns, clip=self.clip)
        loss = (weights * token_loss).sum()
        metrics = {
            "train/loss": Sum(loss.detach()),
            "train/value_mean": masked_mean(values, batch.loss_mask),
            "train/return_mean": masked_mean(batch.returns, batch.loss_mask),
            "train/clip_fraction": masked_mean(clipped.float(), batch.loss_mask),
        }
        return LossOutput(loss=loss, metrics=metrics)
