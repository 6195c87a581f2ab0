"""Comparison of the copies of the training state: weights, main weights and moments on several ranks must be equal bit
for bit.

The pieces of every tensor of a checkpoint are digested in place, and the digests of each copy's pieces are added up.
Main weights and moments are split over data-parallel ranks, so that each piece exists once; their copies are on
tensor-parallel ranks (norms, routers) and pipeline stages (tied weights). Weights also have a copy on every
data-parallel rank, experts on every expert-data-parallel rank. Adam's step count is on every rank.
"""

import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from rlframe.utils.errors import WeightsDrifted
from rlframe.weight_sync.layout.boxes import Box
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter
from rlframe.weight_sync.proof.digest import DigestPlan
from rlframe.weight_sync.proof.terms import BITS

Copy = tuple[str, tuple[int, ...]]
"""A tensor of the checkpoint, and the number of the copy."""
Share = tuple[int, int]
"""A rank's part of a copy: the digest and the number of elements."""
STEPS = "Adam's step count"


@torch.no_grad()
def require_equal(state: Mapping[str, Any], step_counts: Iterable[float] = ()) -> None:
    """Compares all copies of a training state. All ranks must call it together.

    Args:
        state: the state that `checkpoint.stage` saves, or a part of it.
        step_counts: step counts of the optimizer's parts.

    Raises:
        WeightsDrifted: two copies differ; the message names the tensor and the ranks, on every rank.
    """
    seed = [secrets.randbits(64)]
    dist.broadcast_object_list(seed, src=0)
    mine = shares(state, seed=seed[0], among=several(state))
    mine |= {(STEPS, (dist.get_rank(), place)): (int(count), 1) for place, count in enumerate(step_counts)}
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    verdict = [first_difference(gathered) if gathered is not None else None]
    dist.broadcast_object_list(verdict, src=0)
    if verdict[0]:
        raise WeightsDrifted(verdict[0])


def several(state: Mapping[str, Any]) -> set[str]:
    """Returns the tensors that have more than one copy on all ranks together. All ranks must call it together."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {(piece.key, _numbers(piece.replica_id)) for piece in pieces(state)})
    counts = Counter(key for key, _ in set().union(*held))
    return {key for key, count in counts.items() if count > 1}


def shares(state: Mapping[str, Any], *, seed: int, among: Container[str]) -> dict[Copy, Share]:
    """Returns this rank's part of each copy of the tensors in `among`. Most of a state, the moments, has no second."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    copies: dict[str, Copy] = {}
    parameters: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, piece in enumerate(piece for piece in pieces(state) if piece.key in among):
        assert piece.data is not None
        *_, columns = piece.data.shape or (1,)
        rows = piece.data.numel() // columns
        name = f"{piece.key} {piece.replica_id}"
        copies[name] = piece.key, _numbers(piece.replica_id)
        shapes[name] = tuple(piece.global_shape)
        row, col = place(tuple(piece.global_shape), tuple(piece.global_offset))
        parameters[str(index)] = piece.data.detach().contiguous()
        boxes[name].append(Box(name, row, rows, col, columns, str(index), 0, columns, 1))
    if not copies:
        return {}
    layout = MemoryLayout(
        boxes={name: tuple(each) for name, each in boxes.items()},
        tensors=shapes,
        parameters={name: Parameter(tuple(value.shape), value.dtype) for name, value in parameters.items()},
    )
    found = DigestPlan(layout, parameters, seed=seed).shares().tolist()
    sizes = {name: sum(box.rows * box.cols for box in each) for name, each in boxes.items()}
    return {copies[name]: (share, sizes[name]) for name, share in zip(shapes, found, strict=True)}


def pieces(state: Mapping[str, Any]) -> Iterator[ShardedTensor]:
    """Yields this rank's pieces of tensors in number formats that digests support, those of fused weights one by
    one."""
    for value in nested_values(dict(state)):
        parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            if isinstance(part, ShardedTensor) and part.data is not None and part.data.dtype in BITS:
                yield part


def place(shape: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, int]:
    """Returns row and column of an element in the tensor seen as a matrix."""
    *leading, col = offset or (0,)
    return sum(at * math.prod(shape[axis + 1 : -1]) for axis, at in enumerate(leading)), col


def first_difference(ranks: Iterable[Mapping[Copy, Share]]) -> str | None:
    """Returns a sentence about the first tensor whose copies differ, or None.

    Args:
        ranks: the parts of each rank.
    """
    totals: dict[str, dict[tuple[int, ...], tuple[int, int, list[int]]]] = defaultdict(dict)
    for rank, held in enumerate(ranks):
        for (name, copy), (share, size) in held.items():
            total, elements, holders = totals[name].get(copy, (0, 0, []))
            totals[name][copy] = (total + share) % (1 << 64), elements + size, [*holders, rank]
    for name, copies in totals.items():
        (first, elements, holders), *others = copies.values()
        for total, count, others_holders in others:
            if (total, count) != (first, elements):
                return (
                    f"the training state has drifted apart: {name} is held by ranks {_list(holders)} and by ranks "
                    f"{_list(others_holders)} with different contents"
                )
    return None


def _numbers(replica: Any) -> tuple[int, ...]:
    return (replica,) if isinstance(replica, int) else tuple(int(each) for each in replica)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))
