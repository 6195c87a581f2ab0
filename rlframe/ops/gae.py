"""Values of a critic: their alignment with tokens, generalized advantages, and the critic's loss."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from rlframe.ops.advantages import discounted_returns
from rlframe.types.batch import Batch, Sequences


def before_tokens(after: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] the value of the state before each token, in which the token is chosen. 0.0 at first tokens.

    Args:
        after: value given each token and those before it, the output of a value head.
    """
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    return pad(after, (1, 0))[:-1].index_fill(0, starts, 0.0)


def after_sequences(after: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " R"]:
    """Returns [R] the value of the state in which each sequence ends. `after` is as in `before_tokens`."""
    return after[torch.cumsum(batch.lengths, 0) - 1]


def generalized_advantages(
    rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    batch: Sequences,
    *,
    discount: float,
    gae_lambda: float,
    final_values: Float[Tensor, " R"],
) -> Float[Tensor, " T"]:
    """Returns [T] A_t = delta_t + discount * gae_lambda * A_(t+1), delta_t = reward_t + discount * V_(t+1) - V_t.

    t counts the tokens in the loss only. A prompt or an observation is not an action: the state it leads to is the one
    in which the next token in the loss is chosen, and A is carried past it unchanged. Source: Schulman et al. 2015,
    arXiv 1506.02438, equations 11 to 16; the masked form is verl's compute_gae_advantage_return.

    Args:
        values: value of the state before each token; ignored outside the loss.
        final_values: value of the state after each sequence's last token in the loss; 0.0 if the sequence has ended
            there.
    """
    mask, sequence = batch.loss_mask, batch.sequence_index()[batch.loss_mask]
    present = values[mask]
    last = pad(sequence[1:] != sequence[:-1], (0, 1), value=True)
    following = torch.where(last, final_values[sequence], pad(present[1:], (0, 1)))
    errors = torch.zeros_like(values).masked_scatter(mask, rewards[mask] + discount * following - present)
    return discounted_returns(errors, batch, discount=discount * gae_lambda)


def clipped_value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    *,
    clip: float | None,
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Returns [T] 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), and True where the clipped term is
    greater.

    Source: Engstrom et al. 2020, arXiv 2005.12729, section 3, after OpenAI's baselines; the half as in verl.

    Args:
        clip: bound of the change of V; None means 1/2 (V - R)^2.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, near) / 2, near > plain


def explained_variance(batch: Batch) -> float:
    """Returns 1 - var(returns - values) / var(returns) over the tokens in the loss of rollouts with a reward, because
    the returns of others are their own values. 1 is a perfect critic, 0 one that gives every state the same value,
    below 0 a worse one. 0.0 if all returns are equal."""
    assert batch.values is not None and batch.returns is not None
    scored = batch.loss_mask & ~torch.repeat_interleave(batch.rewards.isnan(), batch.lengths)
    known, error = batch.returns[scored].double(), (batch.returns - batch.values)[scored].double()
    if known.numel() == 0 or bool(known.min() == known.max()):
        return 0.0
    return float(1 - error.var(correction=0) / known.var(correction=0))
