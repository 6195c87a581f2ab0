"""Packing of rollouts into a batch, and distribution of sequences over ranks and micro-batches."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import DTypeLike
from torch import Tensor

from rlframe.types.batch import Batch, Sequences
from rlframe.types.rollout import FinishReason, Group, Rollout, members
from rlframe.types.turn import state_of_tokens


def pack(groups: Sequence[Group], *, mask_truncated: bool = False) -> Batch:
    """Returns the rollouts of all groups packed end to end, group after group.

    Args:
        mask_truncated: whether attempts that reached a limit of tokens or turns, as their last sequence says, are
            excluded from the loss.
    """
    rollouts = members(groups)
    names = list(rollouts[0].reward_weights) if rollouts else []
    attempt = attempt_index(groups)
    own = range(len(rollouts)) if attempt is None else attempt.tolist()
    last = dict(zip(own, rollouts, strict=True))
    cut = [mask_truncated and last[number].finish_reason is FinishReason.LENGTH for number in own]
    packed = pack_sequences(rollouts)
    return Batch(
        token_ids=packed.token_ids,
        lengths=packed.lengths,
        loss_mask=packed.loss_mask & ~torch.repeat_interleave(torch.tensor(cut, dtype=torch.bool), packed.lengths),
        rollout_logprobs=joined([rollout.rollout_logprobs for rollout in rollouts], np.float32),
        versions=joined([rollout.versions for rollout in rollouts], np.int32),
        group=torch.repeat_interleave(torch.tensor([len(group.rollouts) for group in groups], dtype=torch.int64)),
        attempt=attempt,
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        # An attempt may go on, in its next sequence, after a response that was cut off.
        truncated=torch.tensor(
            [
                rollout is last[number] and rollout.finish_reason is not FinishReason.STOP
                for number, rollout in zip(own, rollouts, strict=True)
            ],
            dtype=torch.bool,
        ),
        reward_parts=columns([parts_of_attempts(rollout) for rollout in rollouts], names),
        part_weights=columns([rollout.reward_weights for rollout in rollouts], names),
        routes=packed_routes(rollouts),
        token_rewards=packed_token_rewards(rollouts),
        **packed_turns(rollouts, packed),
    )


def attempt_index(groups: Sequence[Group]) -> Int[Tensor, " R"] | None:
    """Returns [R] the index of each rollout's attempt. None if every attempt is one sequence."""
    if not any(rollout.sequence for rollout in members(groups)):
        return None
    keys = [(place, rollout.sample_index) for place, group in enumerate(groups) for rollout in group.rollouts]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.int64)


def pack_sequences(rollouts: Sequence[Rollout]) -> Sequences:
    """Returns the tokens of the rollouts packed end to end, without further data of the rollouts."""
    return Sequences(
        token_ids=joined([rollout.token_ids for rollout in rollouts], np.int64),
        lengths=torch.tensor([rollout.num_tokens for rollout in rollouts], dtype=torch.int64),
        loss_mask=joined([rollout.loss_mask for rollout in rollouts], np.bool_),
    )


def joined(rows: Sequence[np.ndarray], dtype: DTypeLike) -> Shaped[Tensor, " T"]:
    """Returns the rows end to end in one tensor."""
    return torch.from_numpy(np.concatenate(rows, dtype=dtype) if rows else np.empty(0, dtype))


def parts_of_attempts(rollout: Rollout) -> Mapping[str, float]:
    """Returns the reward parts but those by turn, which are among the rewards at tokens."""
    return {name: value for name, value in rollout.reward_parts.items() if name not in rollout.turn_parts}


def columns(rows: Sequence[Mapping[str, float]], names: list[str]) -> Float[Tensor, "R K"]:
    """Returns [R, K] the value of each name in each row. NaN if a row has none."""
    return torch.tensor([[row.get(name, math.nan) for name in names] for row in rows]).view(len(rows), len(names))


def packed_token_rewards(rollouts: Sequence[Rollout]) -> Float[Tensor, " T"] | None:
    """Returns [T] the rewards at single tokens, 0.0 for rollouts without any. None if no rollout has some."""
    given = [rollout.rewards_at_tokens for rollout in rollouts]
    if all(rewards is None for rewards in given):
        return None
    rows = [
        np.zeros(rollout.num_tokens) if rewards is None else rewards
        for rollout, rewards in zip(rollouts, given, strict=True)
    ]
    return joined(rows, np.float32)


def packed_turns(rollouts: Sequence[Rollout], packed: Sequences) -> dict[str, Int[Tensor, " T"]]:
    """Returns `Batch.turns` and `Batch.states`. Nothing if no attempt has several turns.

    Args:
        packed: the rollouts' tokens.
    """
    if max((rollout.first_turn for rollout in rollouts), default=0) == 0 and bool((responses_in(packed) < 2).all()):
        return {}
    turns = [np.full(rollout.num_tokens, -1, np.int32) for rollout in rollouts]
    states = [np.zeros(rollout.num_tokens, np.uint64) for rollout in rollouts]
    for rollout, own_turns, own_states in zip(rollouts, turns, states, strict=True):
        for number, (start, end) in enumerate(rollout.turns, start=rollout.first_turn):
            known = rollout.records[number].state if number < len(rollout.records) else ""
            state = known or state_of_tokens(rollout.token_ids[:start].tobytes())
            own_turns[start:end], own_states[start:end] = number, int(state, 16)
    return {
        "turns": joined(turns, np.int32),
        "states": joined([row.view(np.int64) for row in states], np.int64),
    }


def responses_in(packed: Sequences) -> Int[Tensor, " R"]:
    """Returns [R] the number of stretches of tokens in the loss of each sequence."""
    begins = packed.loss_mask.clone()
    begins[1:] &= ~packed.loss_mask[:-1]
    ends = packed.lengths.cumsum(0)
    starts = ends - packed.lengths
    inside = starts < packed.num_tokens
    begins[starts[inside]] = packed.loss_mask[starts[inside]]
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), begins.cumsum(0)])
    return counts[ends] - counts[starts]


def packed_routes(rollouts: Sequence[Rollout]) -> Shaped[Tensor, "T layers k"] | None:
    """Returns the routed experts in the layout of `Sequences.routes`. None if the rollouts have none."""
    found = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    if not found:
        return None
    assert len(found) == len(rollouts), "either all rollouts of a batch have routes, or none"
    packed = torch.zeros(
        sum(rollout.num_tokens for rollout in rollouts),
        *found[0].shape[1:],
        dtype=torch.from_numpy(np.empty(0, found[0].dtype)).dtype,
    )
    pieces = packed.split([rollout.num_tokens for rollout in rollouts])
    for piece, routes in zip(pieces, found, strict=True):
        assert len(routes) == len(piece) - 1, "every token but the last has routes"
        piece.numpy()[:-1] = routes
    return packed


def split_into_microbatches(
    lengths: list[int], *, num_ranks: int, max_tokens: int, units: list[int] | None = None
) -> list[list[list[int]]]:
    """Returns sequence indices by rank and micro-batch. Every rank gets the same number of micro-batches.

    Units go to ranks longest first, each to the rank with the fewest tokens; within a rank they fill micro-batches of
    at most `max_tokens` by first-fit decreasing. Ranks with fewer micro-batches split theirs, or get empty ones if they
    have no more units, because every rank must take part in every collective.

    Args:
        units: unit of each sequence; a unit is never split. None makes each sequence a unit of its own.

    Raises:
        ValueError: a unit is longer than max_tokens.
    """
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(range(len(lengths)) if units is None else units):
        members.setdefault(unit, []).append(index)
    groups = list(members.values())
    sizes = [sum(lengths[index] for index in group) for group in groups]
    return distribute(groups, sizes, num_ranks=num_ranks, max_tokens=max_tokens)


def distribute(groups: list[list[int]], sizes: list[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Returns sequence indices by rank and micro-batch, as `split_into_microbatches`, of groups that stay whole.

    Args:
        sizes: number of tokens of each group.

    Raises:
        ValueError: a group is longer than max_tokens.
    """
    longest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    if longest is not None and sizes[longest] > max_tokens:
        what = "sequence" if len(groups[longest]) == 1 else "pair or group of sequences that belong together"
        raise ValueError(
            f"train.max_tokens_per_microbatch must be at least the longest {what}, {sizes[longest]} tokens, "
            f"got {max_tokens}"
        )
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for unit in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = loads.index(min(loads))
        ranks[rank].append(unit)
        loads[rank] += sizes[unit]
    filled = [fill(own, sizes, max_tokens) for own in ranks]
    count = max(len(microbatches) for microbatches in filled)
    return [
        [[index for unit in microbatch for index in groups[unit]] for microbatch in stretch(microbatches, count)]
        for microbatches in filled
    ]


def fill(indices: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Puts each index, in the given order, into the first micro-batch that has room for it (first-fit)."""
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
    """Returns the same sequences in exactly `count` micro-batches. Halves the fullest one until there are enough."""
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
