"""Loss aggregation: from per-token losses to one number, as per-token weights.

Every mode is a weighted sum over tokens. Its weights need counts over the whole optimizer step, so they are computed
once, on the whole step, and travel with the tokens: no split over ranks or micro-batches can change the loss.
Source of the modes: verl `core_algos.py` agg_loss; SkyRL `ppo_utils.py` for prompt_mean.
"""

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.types.batch import Batch, Sequences


class Aggregation(StrEnum):
    """Rules by which token losses become one number. m is the loss mask, N its sum over the step, B the number of
    sequences of the step, fully masked ones included."""

    TOKEN_MEAN = "token_mean"
    """1 / N: every token counts the same (DAPO)."""
    TOKEN_SUM = "token_sum"
    """1: the plain sum."""
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    """1 / B: sums within sequences, mean over them."""
    SEQ_MEAN_TOKEN_SUM_NORM = "seq_mean_token_sum_norm"
    """1 / (B * L) with a constant L (Dr.GRPO)."""
    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    """1 / (B * tokens of the sequence): every sequence counts the same (the original GRPO)."""
    PROMPT_MEAN = "prompt_mean"
    """1 / (P * tokens of the prompt's group): every prompt counts the same."""


def token_weights(
    batch: Sequences,
    mode: Aggregation,
    *,
    constant_length: int | None = None,
    importance: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """Returns [T] the weight of each token's loss in the optimizer step `batch`. 0.0 where loss_mask is False.

    Args:
        constant_length: L of seq_mean_token_sum_norm, in tokens.
        importance: number of tokens that each token counts as, in numerators and denominators, so that a mean remains a
            mean.
    """
    mask = batch.loss_mask.float() if importance is None else importance * batch.loss_mask
    sequence = batch.sequence_index()
    if mode is Aggregation.TOKEN_SUM:
        return mask
    if mode is Aggregation.TOKEN_MEAN:
        return mask / divisor(mask.sum())
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        return mask / batch.num_sequences
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        assert constant_length is not None
        return mask / (batch.num_sequences * constant_length)
    if mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return mask / (count_by(sequence, mask) * batch.num_sequences)
    assert isinstance(batch, Batch)
    # Groups are renumbered: an optimizer step may hold any subset of the batch's prompts.
    prompts, prompt_of_sequence = torch.unique(batch.group, return_inverse=True)
    return mask / (count_by(prompt_of_sequence[sequence], mask) * len(prompts))


def count_by(index: Tensor, mask: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Returns [T] the sum over the masked-in tokens that share each token's index. 1 if there are none."""
    size = int(index.max()) + 1 if index.numel() else 0
    return divisor(torch.zeros(size).index_add_(0, index, mask))[index]


def divisor(count: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Returns the count, with 0 replaced by 1. `clamp(min=1)` would be wrong, because a token may count as less than
    one."""
    return torch.where(count > 0, count, 1.0)
