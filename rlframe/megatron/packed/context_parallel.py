"""Context parallelism: the tokens of packed sequences on each rank, and gathering of all ranks' values.

Each sequence is split into 2 * cp equal chunks, of which rank r has numbers r and 2 * cp - 1 - r: one early and one
late, so that under causal attention every rank has the same work (Megatron's and Transformer Engine's zigzag order).
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


def positions_of_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Returns [T / cp] the position in its sequence of each token of rank `cp_rank`, sequence after sequence.

    Args:
        cu_seqlens: [R + 1] bounds of the sequences in the whole pack; their lengths are multiples of 2 * cp, if cp > 1.
    """
    own = (cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size
    index = torch.arange(int(own.sum()), device=cu_seqlens.device)
    index = index - torch.repeat_interleave(cu_seqlens[:-1] // cp_size, own)
    if cp_size == 1:
        return index
    chunk = torch.repeat_interleave(own // 2, own)
    return index + chunk * torch.where(index < chunk, cp_rank, 2 * cp_size - 2 - cp_rank)


def rows_of_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Returns [T / cp] the position in the whole pack of each token of rank `cp_rank`."""
    own = (cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size
    return positions_of_rank(cu_seqlens, cp_size, cp_rank) + torch.repeat_interleave(cu_seqlens[:-1], own)


def gather_tokens(values: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup, *, alike: bool) -> Tensor:
    """Returns [T, ...] of the whole pack in its order, from the [T / cp, ...] of each rank.

    Args:
        alike: True if all ranks compute the same from it, such as a loss: a rank's gradient is then its part of its
            own. False if each uses it for results of its own, as attention does: the gradients of all are summed.
    """
    if group.size() == 1:
        return values
    gathered = gather_from_sequence_parallel_region(
        values.contiguous(), tensor_parallel_output_grad=not alike, group=group
    )
    return gathered[torch.argsort(rows_of_ranks(cu_seqlens, group.size()))]


def rows_of_ranks(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Returns [T] the position in the whole pack of each token of the first rank, then of the second, and so on."""
    return torch.cat([rows_of_rank(cu_seqlens, cp_size, rank) for rank in range(cp_size)])


def tokens_to_heads(values: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns [T, heads / cp, ...] of the whole pack in its order, of this rank's part of the heads, from the
    [T / cp, heads, ...] of each rank. Source: Jacobs et al. 2023, arXiv 2309.14509, section 3.1."""
    parts = values.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return all_to_all(group, parts).flatten(0, 1)[torch.argsort(rows_of_ranks(cu_seqlens, group.size()))]


def heads_to_tokens(values: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns [T / cp, heads, ...] of this rank's tokens, from the [T, heads / cp, ...] of each rank."""
    parts = values[rows_of_ranks(cu_seqlens, group.size())].unflatten(0, (group.size(), -1)).contiguous()
    return all_to_all(group, parts).transpose(0, 1).flatten(1, 2)
