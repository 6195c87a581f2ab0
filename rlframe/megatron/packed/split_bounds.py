"""The keys that each of two calls reads, where attention to a shared prompt is a call of its own.

The keys that a sequence sees are those of its own tokens, and those of the prompt that it shares. Gathered for each
sequence, as one call would have them, they are a multiple of the rows; see `split_attention` for what two calls cost.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlframe.megatron.packed.bounds import bounds_of
from rlframe.megatron.transfer import upload
from rlframe.ops.prefixes import KEYS_PER_ROW

WIDEST_HEAD = 128
"""Width of heads up to which attention is split: up to there cuDNN has a backward pass on every GPU."""


@dataclass(frozen=True, slots=True)
class Call:
    """The sequences of one call. Rows of no sequence are not written by it."""

    queries: Tensor
    """[n + 1] int32 bounds of the sequences' queries, as if those of all sequences followed one another."""
    keys: Tensor
    """[n + 1] int32 the same of their keys."""
    first_queries: Tensor
    """[n + 1] int32 the row of each sequence's first query, then the number of rows."""
    first_keys: Tensor
    """[n + 1] int32 the same of their keys."""
    most_queries: int
    """Queries of the sequence that has most."""
    most_keys: int
    causal: bool
    """Whether a query sees the keys up to its own place only. Otherwise it sees all keys of its sequence."""


@dataclass(frozen=True, slots=True)
class Split:
    """Two calls which together show each query of a pack all its keys once."""

    own: Call
    """Each sequence's own rows. Every row of the pack is in it, padding as one more sequence."""
    prompts: Call
    """The rows of all sequences of a group that share its prompt, against the rows of the prompt."""
    reads: Tensor
    """[T_padded] bool whether the row is a query of `prompts`."""
    is_read: Tensor
    """[T_padded] bool whether the row is a key of `prompts`."""

    @classmethod
    def of(cls, bounds: Tensor, shared: Tensor, num_keys: int) -> "Split | None":
        """Returns the calls for a pack. None if its sequences share too little, or not the same number of tokens within
        a group.

        Args:
            bounds: [R + 1, or R + 2 with padding] bounds of the sequences' own rows.
            shared: see Sequences.
            num_keys: number of keys that all sequences read together.
        """
        num_rows = int(bounds[-1])
        groups = groups_of(bounds.tolist(), shared.tolist())
        if not groups or num_keys < KEYS_PER_ROW * num_rows:
            return None
        longest = int(bounds.diff().max())
        reads, is_read = (torch.zeros(num_rows, dtype=torch.bool) for _ in range(2))
        for group in groups:
            reads[group.readers] = True
            is_read[group.prompt] = True
        return cls(
            own=Call(bounds, bounds, bounds, bounds, most_queries=longest, most_keys=longest, causal=True),
            prompts=Call(
                *(_bounds([each[part] for each in groups]) for part in range(2)),
                *(_firsts([each[part] for each in groups], num_rows) for part in range(2)),
                most_queries=max(_size(group.readers) for group in groups),
                most_keys=max(_size(group.prompt) for group in groups),
                causal=False,
            ),
            reads=reads,
            is_read=is_read,
        )

    def on(self, device: torch.device) -> "Split":
        """Returns the same on `device`."""
        return Split(
            own=_call_on(self.own, device),
            prompts=_call_on(self.prompts, device),
            reads=upload(self.reads, device),
            is_read=upload(self.is_read, device),
        )


class Group(NamedTuple):
    """Sequences that share a prompt, by their rows."""

    readers: slice
    """Own rows of all sequences but the first, whose rows have the prompt."""
    prompt: slice


def groups_of(bounds: list[int], shared: list[int]) -> list[Group]:
    """Returns the groups of which some sequence shares tokens. None at all if the sequences of one share different
    numbers of tokens.

    Args:
        bounds: bounds of the sequences' own rows.
        shared: see Sequences.
    """
    groups = []
    heads = [index for index, count in enumerate(shared) if count == 0]
    for head, end in pairwise([*heads, len(shared)]):
        counts = set(shared[head + 1 : end])
        if len(counts) > 1:
            return []
        for count in counts:
            prompt = slice(bounds[head], bounds[head] + count)
            assert prompt.stop <= bounds[head + 1], "a sequence shares tokens of the group's first one"
            groups.append(Group(readers=slice(bounds[head + 1], bounds[end]), prompt=prompt))
    return groups


def _size(rows: slice) -> int:
    return rows.stop - rows.start


def _bounds(parts: list[slice]) -> Tensor:
    return bounds_of(torch.tensor([_size(part) for part in parts]))


def _firsts(parts: list[slice], num_rows: int) -> Tensor:
    return torch.tensor([*(part.start for part in parts), num_rows], dtype=torch.int32)


def _call_on(call: Call, device: torch.device) -> Call:
    tensors = [call.queries, call.keys, call.first_queries, call.first_keys]
    there = {id(each): upload(each, device) for each in tensors}
    return Call(
        *(there[id(each)] for each in tensors),
        most_queries=call.most_queries,
        most_keys=call.most_keys,
        causal=call.causal,
    )
