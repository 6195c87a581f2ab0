"""A critic's values: where they belong, what they make of rewards, and what the critic learns from."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from rlframe.ops.advantages import discounted_returns
from rlframe.types.batch import Sequences


def before_tokens(after: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] the value of the state before each token, the one in which it is chosen; 0.0 at first tokens.

    Args:
        after: value given the tokens up to and with each one, as a model with a value head says it.
    """
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    return pad(after, (1, 0))[:-1].index_fill(0, starts, 0.0)


def after_sequences(after: Float[Tensor, " T"], batch: Sequences) -> Float[Tensor, " R"]:
    """Returns [R] the value of the state in which each sequence ends; `after` as in `before_tokens`."""
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

    t counts the tokens in the loss only: a prompt or an observation is no action, so that the state it leads to is the
    one in which the next token in the loss is chosen, and A is carried past it unchanged. Source: Schulman et al. 2015,
    arXiv 1506.02438, equations 11 to 16; the masked form is verl's compute_gae_advantage_return.

    Args:
        values: of the state before each token. What stands outside the loss is not read.
        final_values: of the state after each sequence's last token in the loss; 0.0 where nothing comes after it.
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
    """Returns [T] 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), and where the clipped one is the
    greater.

    Source: Engstrom et al. 2020, arXiv 2005.12729, section 3, after OpenAI's baselines; the half as in verl.

    Args:
        clip: None leaves 1/2 (V - R)^2.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, near) / 2, near > plain


def explained_variance(values: Float[Tensor, " T"], returns: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> float:
    """1 - var(returns - values) / var(returns) over the True tokens: 1 for a critic that knows all, 0 for one that
    says the same of every state, below 0 for a worse one. 0.0 where all returns are equal."""
    known, error = returns[mask].double(), (returns - values)[mask].double()
    if known.numel() == 0 or bool(known.min() == known.max()):
        return 0.0
    return float(1 - error.var(correction=0) / known.var(correction=0))
