"""Advantages from rewards."""

from collections.abc import Callable
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlframe.ops.sequences import sequence_sums
from rlframe.types.batch import Batch, Sequences

EPS = 1e-6
"""Added to standard deviations of rewards."""


class NormalizeBy(StrEnum):
    """Divisors of the rewards after subtraction of their group's mean. Each is increased by 1e-6, as in verl (TRL,
    ms-swift: 1e-4)."""

    NONE = "none"
    """No division (Dr.GRPO, arXiv 2503.20783, equation 4; TRL's and ms-swift's scale_rewards=none)."""
    GROUP_STD = "group_std"
    """The standard deviation of the group's rewards (GRPO, arXiv 2402.03300, section 4.1.2)."""
    BATCH_STD = "batch_std"
    """The standard deviation of all rewards of the batch, before the means are subtracted (TRL's scale_rewards=batch;
    Lite PPO, arXiv 2508.08221)."""
    PART_STD = "part_std"
    """The standard deviation of each reward part in the group. The parts' weighted sum is then divided by its standard
    deviation over the batch's rollouts (GDPO, arXiv 2601.05242; TRL's normalize_then_sum)."""


def group_advantages(
    rewards: Float[Tensor, " R"], group: Int[Tensor, " R"], *, by: NormalizeBy, eps: float = EPS
) -> Float[Tensor, " R"]:
    """Returns [R] (reward - group mean) / (std + eps), or only reward - group mean with `none`.

    Standard deviations are unbiased (n - 1), as in torch, verl and TRL. A group whose rewards are all equal gets
    exactly 0; in verl, rounding errors divided by a std of their size can become a signal.
    """
    assert by is not NormalizeBy.PART_STD, "part_std is computed by part_advantages"
    num_groups = int(group.max()) + 1 if group.numel() else 0
    counts = torch.bincount(group, minlength=num_groups).to(rewards.dtype)
    means = torch.zeros_like(counts).index_add_(0, group, rewards) / counts
    # Rounding in the mean must not turn a group of equal rewards into a signal.
    lowest, highest = (
        torch.zeros_like(counts).scatter_reduce_(0, group, rewards, extreme, include_self=False)
        for extreme in ("amin", "amax")
    )
    centred = torch.where((lowest == highest)[group], 0.0, rewards - means[group])
    if by is NormalizeBy.NONE or not rewards.numel():
        return centred
    if by is NormalizeBy.BATCH_STD:
        return centred / (deviation(rewards) + eps)
    variances = torch.zeros_like(counts).index_add_(0, group, centred.square()) / (counts - 1).clamp(min=1)
    return centred / (variances.sqrt()[group] + eps)


def part_advantages(
    parts: Float[Tensor, "R K"], weights: Float[Tensor, "R K"], group: Int[Tensor, " R"], *, eps: float = EPS
) -> Float[Tensor, " R"]:
    """Returns [R] the sum over reward parts of weight * group advantage of the part, normalised over the batch.

    Source: Liu et al. 2026, arXiv 2601.05242 (GDPO). The last normalisation is over rollouts, as in TRL; verl's is over
    tokens, so that long rollouts weigh more.

    Args:
        parts: values of the reward parts. NaN means that the part did not score the rollout: the rollout is then left
            out of the part's group, and the part out of the rollout's sum.
        weights: weights of the parts, the same in each row.
    """
    total = torch.zeros(len(parts))
    for part, weight in zip(parts.T, weights.T, strict=True):
        said = ~part.isnan()
        advantages = group_advantages(part[said], group[said], by=NormalizeBy.GROUP_STD, eps=eps)
        total[said] += weight[said] * advantages
    # Their mean is 0 already in every group; rounding errors of it must not become a signal.
    return total / (deviation(total) + eps)


def deviation(values: Float[Tensor, " R"]) -> Float[Tensor, ""]:
    """Returns the unbiased standard deviation, or 0 for one value."""
    if not values.numel():
        return torch.zeros(())
    return (values - values.mean()).square().sum().div(max(1, values.numel() - 1)).sqrt()


def leave_one_out_advantages(rewards: Float[Tensor, " R"], group: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Returns [R] reward - mean reward of the others of its group, which is n / (n - 1) * (reward - group mean).

    A rollout alone in its group gets 0. Source: Ahmadian et al. 2024, arXiv 2402.14740 (RLOO); the second form is
    verl's.
    """
    counts = torch.bincount(group).to(rewards.dtype)[group]
    return group_advantages(rewards, group, by=NormalizeBy.NONE) * counts / (counts - 1).clamp(min=1)


def last_token_rewards(rewards: Float[Tensor, " R"], batch: Sequences) -> Float[Tensor, " T"]:
    """Returns [T] each sequence's reward at its last token in the loss, 0.0 elsewhere."""
    sequence = batch.sequence_index()
    places = torch.where(batch.loss_mask, torch.arange(batch.num_tokens), -1)
    last = torch.full((batch.num_sequences,), -1).scatter_reduce_(0, sequence, places, "amax")
    present = last >= 0
    return torch.zeros(batch.num_tokens).index_copy_(0, last[present], rewards[present])


def rewards_by_token(batch: Batch) -> Float[Tensor, " T"]:
    """Returns [T] the rewards at single tokens, and at each sequence's last token in the loss also the reward of its
    attempt and `later_rewards`."""
    if batch.token_rewards is None:
        return last_token_rewards(batch.rewards, batch)
    return last_token_rewards(batch.rewards + later_rewards(batch), batch) + batch.token_rewards


def later_rewards(batch: Batch) -> Float[Tensor, " R"]:
    """Returns [R] the sum of the rewards at all tokens, in the loss or not, of each sequence's later ones in its
    attempt.

    They are not discounted, as the attempt's own reward is not, which every sequence of the attempt gets at its end: an
    environment's reward at the last token of an attempt is then worth the same as a reward function's. No paper's own.
    """
    assert batch.token_rewards is not None
    own = batch.token_rewards.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index(), batch.token_rewards)
    if batch.attempt is None:
        return torch.zeros_like(own)
    later, earned = [], dict.fromkeys(batch.attempt.tolist(), 0.0)
    for attempt, reward in zip(reversed(batch.attempt.tolist()), reversed(own.tolist()), strict=True):
        later.append(earned[attempt])
        earned[attempt] += reward
    return torch.tensor(later[::-1], dtype=own.dtype)


def rewards_by_sequence(batch: Batch) -> Float[Tensor, " R"]:
    """Returns [R] the reward of each rollout's attempt plus the rewards at the attempt's tokens: its return without
    discount."""
    if batch.token_rewards is None:
        return batch.rewards
    return batch.rewards + attempt_sums(batch.token_rewards, batch, everywhere=True)


def attempt_sums(values: Float[Tensor, " T"], batch: Batch, *, everywhere: bool = False) -> Float[Tensor, " R"]:
    """Returns [R] the sum of values over all sequences of each rollout's attempt.

    Args:
        everywhere: whether tokens that are not in the loss count too, such as those of masked rollouts, whose rewards
            are part of their group's baseline.
    """
    if everywhere:
        sums = values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_index(), values)
    else:
        sums = sequence_sums(values, batch)
    if batch.attempt is None:
        return sums
    _, attempt = torch.unique(batch.attempt, return_inverse=True)
    return torch.zeros(int(attempt.max()) + 1, dtype=sums.dtype).index_add_(0, attempt, sums)[attempt]


def over_attempts(
    compute: Callable[..., Float[Tensor, " A"]], *values: Shaped[Tensor, "R ..."], batch: Batch
) -> Float[Tensor, " R"]:
    """Returns [R] what `compute` gives for the attempts, each once however many sequences it has.

    Args:
        compute: function of [A] or [A, K] values of A attempts and of their [A] groups.
        values: the same in all rows of one attempt.
    """
    if batch.attempt is None:
        return compute(*values, batch.group)
    _, attempt = torch.unique(batch.attempt, return_inverse=True)
    rows = torch.arange(len(attempt))
    first = torch.full((int(attempt.max()) + 1,), len(attempt)).scatter_reduce_(0, attempt, rows, "amin")
    return compute(*(value[first] for value in values), batch.group[first])[attempt]


def rewards_by_part(batch: Batch) -> tuple[Float[Tensor, "R K"], Float[Tensor, "R K"]]:
    """Returns [R, K] values and weights of the reward parts. The rewards at tokens are one more part, of weight 1."""
    assert batch.reward_parts is not None and batch.part_weights is not None, "packing knows the parts"
    if batch.token_rewards is None:
        return batch.reward_parts, batch.part_weights
    sums = attempt_sums(batch.token_rewards, batch, everywhere=True)[:, None]
    return torch.cat([batch.reward_parts, sums], 1), torch.cat([batch.part_weights, torch.ones_like(sums)], 1)


def discounted_returns(rewards: Float[Tensor, " T"], batch: Sequences, *, discount: float) -> Float[Tensor, " T"]:
    """Returns [T] reward to go within each sequence: return_t = reward_t + discount * return of the next token in the
    loss.

    Tokens outside the loss (prompts, observations) are skipped: they earn no reward, do not discount, and get 0.0.
    """
    mask, sequence = batch.loss_mask, batch.sequence_index()[batch.loss_mask]
    counts = torch.bincount(sequence, minlength=batch.num_sequences)
    rank = torch.arange(len(sequence)) - (torch.cumsum(counts, 0) - counts)[sequence]
    # One column for each remaining token, so that the loop runs over the longest response only.
    to_go = counts[sequence] - 1 - rank
    columns = torch.zeros(int(counts.max()) if counts.numel() else 0, batch.num_sequences)
    columns[to_go, sequence] = rewards[mask]
    for place in range(1, len(columns)):
        columns[place] += discount * columns[place - 1]
    returns = torch.zeros(batch.num_tokens)
    returns[mask] = columns[to_go, sequence]
    return returns


def whiten(values: Float[Tensor, " T"], mask: Bool[Tensor, " T"], *, eps: float = 1e-8) -> Float[Tensor, " T"]:
    """Returns [T] (value - mean) / sqrt(variance + eps) over the True tokens, 0.0 elsewhere.

    The variance is the unbiased one (n - 1), as in verl's masked_whiten. Values that are all equal give exactly 0.
    """
    chosen = values[mask]
    if chosen.numel() == 0 or bool(chosen.min() == chosen.max()):
        return torch.zeros_like(values)
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / (chosen.numel() - 1)
    return torch.zeros_like(values).masked_scatter_(mask, centred / (variance + eps).sqrt())
