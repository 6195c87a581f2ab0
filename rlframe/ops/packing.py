"""Which sequence goes to which rank and micro-batch, and packing rollouts into a Batch."""

import torch

from rlframe.types.batch import Batch
from rlframe.types.rollout import FinishReason, Rollout


def pack(rollouts: list[Rollout], group_size: int, *, mask_truncated: bool = False) -> Batch:
    """The rollouts end to end, in the order given: ordered by prompt, `group_size` of each.

    Args:
        mask_truncated: no token of a rollout that ran out of tokens is in the loss.
    """
    in_loss = [not (mask_truncated and rollout.finish_reason is FinishReason.LENGTH) for rollout in rollouts]
    masks = [[flag and kept for flag in rollout.loss_mask] for rollout, kept in zip(rollouts, in_loss, strict=True)]
    return Batch(
        token_ids=torch.tensor([token for rollout in rollouts for token in rollout.token_ids], dtype=torch.int64),
        lengths=torch.tensor([len(rollout.token_ids) for rollout in rollouts], dtype=torch.int64),
        loss_mask=torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool),
        rollout_logprobs=torch.tensor([value for rollout in rollouts for value in rollout.rollout_logprobs]),
        group=torch.arange(len(rollouts)) // group_size,
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        versions=torch.tensor([min(segment.version for segment in rollout.segments) for rollout in rollouts]),
    )


def split_into_microbatches(lengths: list[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Sequence indices by rank and micro-batch; every rank gets the same number of micro-batches.

    Sequences go to ranks longest first, each to the rank with the fewest tokens; within a rank they fill micro-batches
    of at most `max_tokens` by first-fit decreasing. Ranks with fewer micro-batches split theirs, or, when they run out
    of sequences, get empty ones: collectives need every rank to take part in each.

    Raises:
        ValueError: a sequence is longer than max_tokens.
    """
    if (longest := max(lengths, default=0)) > max_tokens:
        raise ValueError(
            f"train.max_tokens_per_microbatch must be at least the longest sequence, {longest} tokens, got {max_tokens}"
        )
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        ranks[rank].append(index)
        loads[rank] += lengths[index]
    filled = [fill(indices, lengths, max_tokens) for indices in ranks]
    count = max(len(microbatches) for microbatches in filled)
    return [stretch(microbatches, count) for microbatches in filled]


def fill(indices: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """First-fit: each index, in the order given, into the first micro-batch with room for it."""
    microbatches: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        slot = next((i for i, left in enumerate(room) if left >= lengths[index]), None)
        if slot is None:
            microbatches.append([])
            room.append(max_tokens)
            slot = len(room) - 1
        microbatches[slot].append(index)
        room[slot] -= lengths[index]
    return microbatches


def stretch(microbatches: list[list[int]], count: int) -> list[list[int]]:
    """The same sequences in exactly `count` micro-batches: halves the fullest until there are enough."""
    microbatches = [list(microbatch) for microbatch in microbatches]
    while len(microbatches) < count:
        fullest = max(range(len(microbatches)), key=lambda i: len(microbatches[i]), default=None)
        if fullest is None or len(microbatches[fullest]) < 2:
            microbatches.append([])
            continue
        whole = microbatches[fullest]
        half = len(whole) // 2
        microbatches[fullest : fullest + 1] = [whole[:half], whole[half:]]
    return microbatches
