"""One exchange of tensors between all ranks."""

from collections.abc import Sequence
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(
    sent: Sequence[tuple[int, Tensor]],
    expected: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Returns the tensors that ranks send this one, each [n], in the order of `expected`. All ranks must call it
    together; between two ranks the order is the sender's.

    Args:
        sent: (rank to send to, [n] tensor).
        expected: (rank that sends, number of elements).
    """
    world = dist.get_world_size()
    outgoing = [tensor for _, tensor in sorted(sent, key=itemgetter(0))]
    outgoing_sizes, incoming_sizes = [0] * world, [0] * world
    for rank, tensor in sent:
        outgoing_sizes[rank] += tensor.numel()
    for rank, size in expected:
        incoming_sizes[rank] += size
    buffer = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=dtype, device=device)
    if world == 1:
        received = buffer
    else:
        received = torch.empty(sum(incoming_sizes), dtype=dtype, device=device)
        dist.all_to_all_single(received, buffer, incoming_sizes, outgoing_sizes)
    by_sender = sorted(range(len(expected)), key=lambda index: expected[index][0])
    values = received.split([expected[index][1] for index in by_sender])
    found: list[Tensor] = [received] * len(expected)
    for index, value in zip(by_sender, values, strict=True):
        found[index] = value
    return found
