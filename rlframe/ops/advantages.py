"""Advantages from rewards."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlframe.types.batch import Sequences


def group_advantages(
    rewards: Float[Tensor, " R"], group: Int[Tensor, " R"], *, normalize: bool, eps: float = 1e-6
) -> Float[Tensor, " R"]:
    """[R] (reward - group mean) / (group std + eps), or only reward - group mean without `normalize`.

    The standard deviation is the unbiased one (n - 1), as torch and verl have it. A group whose rewards are all equal
    gets exactly 0. Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2 (normalised); Liu et al. 2025,
    arXiv 2503.20783, equation 4 (not normalised: Dr.GRPO).
    """
    num_groups = int(group.max()) + 1 if group.numel() else 0
    counts = torch.bincount(group, minlength=num_groups).to(rewards.dtype)
    means = torch.zeros_like(counts).index_add_(0, group, rewards) / counts
    # Rounding in the mean must not turn a group of equal rewards into a signal.
    lowest, highest = (
        torch.zeros_like(counts).scatter_reduce_(0, group, rewards, extreme, include_self=False)
        for extreme in ("amin", "amax")
    )
    centred = torch.where((lowest == highest)[group], 0.0, rewards - means[group])
    if not normalize:
        return centred
    variances = torch.zeros_like(counts).index_add_(0, group, centred.square()) / (counts - 1).clamp(min=1)
    return centred / (variances.sqrt()[group] + eps)


def leave_one_out_advantages(rewards: Float[Tensor, " R"], group: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """[R] reward - mean reward of the others of its group, which is n / (n - 1) * (reward - group mean).

    A rollout alone in its group gets 0. Source: Ahmadian et al. 2024, arXiv 2402.14740 (RLOO); the second
    form is verl's.
    """
    counts = torch.bincount(group).to(rewards.dtype)[group]
    return group_advantages(rewards, group, normalize=False) * counts / (counts - 1).clamp(min=1)


def last_token_rewards(rewards: Float[Tensor, " R"], batch: Sequences) -> Float[Tensor, " T"]:
    """[T] each sequence's reward at its last token in the loss, 0.0 elsewhere."""
    sequence = batch.sequence_index()
    places = torch.where(batch.loss_mask, torch.arange(batch.num_tokens), -1)
    last = torch.full((batch.num_sequences,), -1).scatter_reduce_(0, sequence, places, "amax")
    present = last >= 0
    return torch.zeros(batch.num_tokens).index_copy_(0, last[present], rewards[present])


def discounted_returns(rewards: Float[Tensor, " T"], batch: Sequences, *, discount: float) -> Float[Tensor, " T"]:
    """[T] reward to go within each sequence: return_t = reward_t + discount * return of the next token in the loss.

    Tokens outside the loss (prompts, observations) are stepped over: they neither earn nor discount, and get 0.0.
    """
    mask, sequence = batch.loss_mask, batch.sequence_index()[batch.loss_mask]
    counts = torch.bincount(sequence, minlength=batch.num_sequences)
    rank = torch.arange(len(sequence)) - (torch.cumsum(counts, 0) - counts)[sequence]
    # One column for each token to go, so that the loop is over the longest response only.
    to_go = counts[sequence] - 1 - rank
    columns = torch.zeros(int(counts.max()) if counts.numel() else 0, batch.num_sequences)
    columns[to_go, sequence] = rewards[mask]
    for place in range(1, len(columns)):
        columns[place] += discount * columns[place - 1]
    returns = torch.zeros(batch.num_tokens)
    returns[mask] = columns[to_go, sequence]
    return returns


def whiten(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"], *, eps: float = 1e-8) -> Float[Tensor, " T"]:
    """[T] (value - mean) / sqrt(variance + eps) over the True tokens, 0.0 elsewhere.

    The variance is the unbiased one (n - 1), as in verl's masked_whiten. Values that are all equal give exactly 0.
    """
    chosen = values[mask]
    if chosen.numel() == 0 or bool(chosen.min() == chosen.max()):
        return torch.zeros_like(values)
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / (chosen.numel() - 1)
    return torch.zeros_like(values).masked_scatter_(mask, centred / (variance + eps).sqrt())
