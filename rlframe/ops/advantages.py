"""Advantages from rewards."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
