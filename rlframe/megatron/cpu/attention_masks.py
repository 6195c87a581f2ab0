"""Attention with sliding windows and sinks, for CPU ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Returns [sequences, heads, positions, value dim] causal attention over right-padded sequences.

    A sink is a key whose logit is learned and whose value is zero: it is appended as a key of zeros, with the logit in
    the mask. Source: Xiao et al. 2023, arXiv 2309.17453; GPT-OSS's reference.

    Args:
        query: [sequences, heads, positions, head dim]; key and value have as many or fewer heads.
        window: number of tokens a query sees, its own included; None for all.
        sinks: [heads] logits, or None.
    """
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = query.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(query.dtype)[:, None, None].expand(-1, len(positions), 1)
        mask = torch.cat([mask.expand(len(sinks), -1, -1), column], dim=-1)
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
