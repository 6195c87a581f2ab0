"""Adam's moments, Muon's momentum and main weights, each rank's own ranges of each parameter, as rectangles of the
whole tensors.

The only file that depends on the internals of Megatron's optimizers. Their public functions for this state gather it
first, on every data-parallel rank (`fully_reshardable`), or write it in a form that only the same layout can read
(`dp_reshardable`). `tests/unit/megatron/checkpoint/test_seams.py` fails where a new Megatron changes what is used here.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from rlframe.megatron.checkpoint.pieces import pieces_by_parameter

SAVED_AS = {
    "param": "fp32_param",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
}
"""Names of the optimizer's tensors in Megatron's checkpoints, by their names in DistributedOptimizer. Muon's matrices
have a momentum, all other parameters Adam's moments."""
PartState = tuple[Tensor, dict[str, Tensor], list[ShardedTensor]]
"""A parameter, the optimizer's tensors of it, and rectangles of the whole tensors, which are views of them."""


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Returns the distributed optimizers: one for all parameters, or one for those of the experts and one for the
    others. Leaves out an empty one, of a rank on which nothing of its kind is trained."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not part.is_stub_optimizer]


def owned(part: Any) -> Iterator[tuple[Tensor, slice, Any]]:
    """Yields each parameter of which this rank keeps moments, this rank's elements of it, and the optimizer's group of
    settings."""
    for parameter in part.model_param_gbuf_map:
        place = part._get_model_param_range_map(parameter)["param"]
        group, _ = part.model_param_group_index_map[parameter]
        yield parameter, slice(place.start, place.end), part.optimizer.param_groups[group]


def counts_in_norm(part: Any, parameter: Tensor) -> bool:
    """Returns whether this rank's gradient of a parameter is part of the gradient norm: it is no copy of another's."""
    # Experts have a group of their own from Megatron 0.19 on.
    groups = {name: getattr(part, name) for name in ("tp_group", "expert_tp_group") if hasattr(part, name)}
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, **groups)


def tensors_of(part: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Returns this rank's main weights `param` of a parameter, and moments `exp_avg` and `exp_avg_sq`, or
    `momentum_buffer`."""
    return part._get_main_param_and_optimizer_states(parameter)


def main_weights(part: Any, parameter: Tensor) -> Tensor:
    """Returns this rank's main weights of a parameter: a key of the optimizer's state."""
    group, place = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][place]


def part_state(part: Any, weights: dict[str, Any]) -> Iterator[PartState]:
    """Yields the state to save of each parameter of which this rank keeps moments."""
    pieces = pieces_by_parameter(weights)
    for parameter in part.model_param_gbuf_map:
        start = part._get_model_param_range_map(parameter)["param"].start
        tensors = tensors_of(part, parameter)
        rectangles = [
            rectangle
            for piece in pieces[parameter]
            for name, key in SAVED_AS.items()
            if name in tensors
            for rectangle in rectangles_of(piece, parameter, start, tensors[name], key)
        ]
        yield parameter, tensors, rectangles


def give_back(part: Any, state: Iterable[PartState]) -> None:
    """Stores the values that were read into the optimizer's tensors in the optimizer, which may keep them in another
    form."""
    for parameter, tensors, _ in state:
        part._set_main_param_and_optimizer_states(parameter, tensors)
    # Of an optimizer that keeps part of its state on the host.
    if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
        part.optimizer._sync_hdo_state_to_sub_optimizers()


def rectangles_of(
    piece: ShardedTensor, parameter: Tensor, first: int, values: Tensor, key: str
) -> Iterator[ShardedTensor]:
    """Yields the parts of `piece` that `values` covers, as rectangles of the whole tensor.

    Args:
        piece: a contiguous part of the parameter, of one or two axes, with its place in the whole tensor.
        first: element of the parameter that `values[0]` belongs to.
        values: [n] optimizer state of consecutive elements of the parameter.
        key: name of that state in a checkpoint.
    """
    assert piece.data is not None and piece.data.is_contiguous() and piece.data.dim() <= 2, piece
    start = piece.data.storage_offset() - parameter.storage_offset()
    begin, end = max(first, start), min(first + values.numel(), start + piece.data.numel())
    columns = piece.data.shape[-1]
    *leading, last_offset = piece.global_offset
    replica: tuple[int, ...] = (0,) if isinstance(piece.replica_id, int) else piece.replica_id
    for row, rows, column, width in cut(begin - start, end - start, columns):
        element = start + row * columns + column - first
        shape = (rows, width) if piece.data.dim() == 2 else (width,)
        offset = (
            (*leading[:-1], leading[-1] + row, last_offset + column)
            if len(shape) == 2
            else (*leading, last_offset + column)
        )
        # The axes that Megatron puts before a piece (layer, expert) are its first ones here.
        shape = (1,) * (len(offset) - len(shape)) + shape
        yield ShardedTensor(
            key=f"optimizer.state.{key}.{piece.key}",
            data=values[element : element + rows * width].view(shape),
            dtype=values.dtype,
            local_shape=shape,
            global_shape=piece.global_shape,
            global_offset=offset,
            axis_fragmentations=None,
            # The last number counts data-parallel copies of the weight; of the state there is one.
            replica_id=(*replica[:-1], 0),
            allow_shape_mismatch=piece.allow_shape_mismatch,
        )


def cut(begin: int, end: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (row, rows, column, width) of rectangles that hold elements `begin` to `end` of a matrix read row by row,
    in that order: the rest of a row, whole rows, the beginning of a row."""
    while begin < end:
        row, column = divmod(begin, columns)
        rows = 1 if column else max(1, (end - begin) // columns)
        width = min(end - begin, columns - column)
        yield row, rows, column, width
        begin += rows * width


def use_torch(part: Any, *, betas: tuple[float, float], eps: float) -> None:
    """Makes an optimizer that has not taken a step torch's AdamW, with the groups that it has. Transformer Engine's
    knows no state but its own."""
    if not isinstance(part.optimizer, torch.optim.Adam):
        part.optimizer = torch.optim.AdamW(part.optimizer.param_groups, betas=betas, eps=eps)


def has_moments(part: Any) -> bool:
    """Returns whether an optimizer has the state of every parameter, as after a step."""
    state = part.optimizer.state
    if isinstance(part.optimizer, torch.optim.Adam):
        return all(parameter in state for group in part.optimizer.param_groups for parameter in group["params"])
    return bool(state)


def allocate_moments(part: Any) -> None:
    """Allocates moments in an optimizer that has not taken a step. Muon's momentum exists from the start."""
    if not isinstance(part.optimizer, torch.optim.Adam):
        part.load_state_dict(part.state_dict())
        return
    # Without Transformer Engine it is torch's, which Megatron 0.16 cannot prepare.
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if "momentum_buffer" in part.optimizer.state.get(parameter, ()):
                continue
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            part.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def step_counts(optimizer: MegatronOptimizer) -> Iterator[float]:
    """Yields Adam's number of steps, in each of its states; see `set_step_count`."""
    for part in parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield from {float(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        else:
            yield from {float(group.get("step", 0)) for group in part.optimizer.param_groups}


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Sets Adam's number of steps: torch counts per parameter, Transformer Engine per group."""
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(count))
    else:
        for group in optimizer.param_groups:
            group["step"] = count
