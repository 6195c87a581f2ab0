"""Context parallelism: the tokens of packed sequences on each rank, and gathering of all ranks' values.

Each sequence is split into 2 * cp equal chunks, of which rank r has numbers r and 2 * cp - 1 - r: one early and one
late, so that under causal attention every rank has the same work (Megatron's and Transformer Engine's zigzag order).
Or, with `train.context_parallel.dynamic`, every sequence of a micro-batch is whole on one of the ranks, where that
gives them about as many tokens each.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

EVEN = 1.05
"""Sequences stay whole if the rank with most tokens then has at most so many times the mean. What they spare is the
exchange of keys and values, which preflight puts at 3 % of a step of short sequences between GPUs of a host."""


class OneRank:
    """Stands for the group of a rank that shares no sequence, where Megatron asks a group for its size."""

    def size(self) -> int:
        """Returns 1."""
        return 1

    def rank(self) -> int:
        """Returns 0."""
        return 0


ALONE = OneRank()


def sharing(packing: PackedSeqParams) -> dist.ProcessGroup | None:
    """Returns the ranks that share the sequences of a micro-batch. None if they are whole on this rank."""
    group = parallel_state.get_context_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return None if group.size() == 1 or packing.local_cp_size == 1 else group


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns the number of ranks that share a sequence, and which of them this one is."""
    return (group.size(), group.rank()) if group else (1, 0)


def follow(module: torch.nn.Module) -> None:
    """Makes Megatron's attention layers below `module` count positions in sequences that are whole on a rank.

    Workaround for Megatron-Core 0.16.1 and 0.19.2: their attention takes a group for each micro-batch
    (`PackedSeqParams.cp_group` and `local_cp_size`), but queries and keys are rotated with the group of the model. Not
    needed any more once `attention.py` passes `packed_seq_params.cp_group` to `apply_rotary_pos_emb`.
    """
    for layer in module.modules():
        if hasattr(layer, "core_attention") and hasattr(layer, "pg_collection"):
            of_model = layer.pg_collection
            alone = copy.copy(of_model)
            alone.cp = ALONE

            def before(
                layer: Any, _: Any, options: dict[str, Any], of_model: Any = of_model, alone: Any = alone
            ) -> None:
                layer.pg_collection = alone if options["packed_seq_params"].local_cp_size == 1 else of_model

            layer.register_forward_pre_hook(before, with_kwargs=True)


def whole_on_ranks(lengths: Sequence[int], cp_size: int) -> list[list[int]] | None:
    """Returns the sequences of each rank, longest first, each given to the rank with the fewest tokens so far. None if
    that is not even enough, see `EVEN`."""
    parts: list[list[int]] = [[] for _ in range(cp_size)]
    tokens = [0] * cp_size
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        least = tokens.index(min(tokens))
        parts[least].append(index)
        tokens[least] += lengths[index]
    return parts if 0 < max(tokens) * cp_size <= EVEN * sum(tokens) else None


def positions_of_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int, num_tokens: int | None = None) -> Tensor:
    """Returns [T / cp] the position in its sequence of each token of rank `cp_rank`, sequence after sequence.

    Args:
        cu_seqlens: [R + 1] bounds of the sequences in the whole pack; their lengths are multiples of 2 * cp, if cp > 1.
        num_tokens: T / cp. If it is None the host waits for a GPU that has the bounds.
    """
    starts = (cu_seqlens // cp_size).long()
    index = torch.arange(int(starts[-1]) if num_tokens is None else num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts, index, right=True) - 1
    index = index - starts[sequence]
    if cp_size == 1:
        return index
    chunk = (starts.diff() // 2)[sequence]
    return index + chunk * torch.where(index < chunk, cp_rank, 2 * cp_size - 2 - cp_rank)


def rows_of_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Returns [T / cp] the position in the whole pack of each token of rank `cp_rank`."""
    own = (cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size
    return positions_of_rank(cu_seqlens, cp_size, cp_rank) + torch.repeat_interleave(cu_seqlens[:-1], own)


def gather_rows(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns [T, ...] of all ranks, those of the first one first, from the [T / cp, ...] of each. All ranks must
    compute the same from it, such as a loss: a rank's gradient is then its part of its own."""
    if group.size() == 1:
        return values
    return gather_from_sequence_parallel_region(values.contiguous(), tensor_parallel_output_grad=False, group=group)


def gather_tokens(values: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns [T, ...] of the whole pack in its order, from the [T / cp, ...] of each rank. Each rank may use it for
    results of its own, as attention does: the gradients of all are summed."""
    if group is None:
        return values
    gathered = gather_from_sequence_parallel_region(values.contiguous(), tensor_parallel_output_grad=True, group=group)
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
