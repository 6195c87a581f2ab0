"""Saving and loading the training state with Megatron's distributed checkpoints, in a form that any layout can load.

Holds weights, Adam's moments and main weights, and a reference that follows the policy. Random state is not in it:
nothing in training draws random numbers (dropout is 0), and sampling draws from counters, not generators. Nor are
Adam's step count and the learning rate: both follow from the number of optimizer steps, which the run's state has.

Saving is three calls: `stage` on all ranks at once, which plans and may copy the state to host memory; `write` on each
by itself, from any thread; and `files.seal` on rank 0 with what the others wrote. Megatron 0.16's own way
forks helper processes at each save from a process full of threads (Ray, gloo, CUDA), which may hang.

The optimizer's state is saved and loaded by the ranks that own it, each its ranges of each parameter as rectangles of
the whole tensor, under the names of Megatron's `fully_reshardable` format. Megatron itself gathers that state first, on
every data-parallel rank in host memory and a buffer at a time on the GPU: four times the model in float32, twice.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlframe.megatron.checkpoint import reading
from rlframe.megatron.checkpoint.files import Staged, Written, seal
from rlframe.megatron.checkpoint.pieces import SavePieces
from rlframe.megatron.lora import state as lora_state
from rlframe.megatron.memory.reference import ReferenceWeights
from rlframe.megatron.model.heads import NoEntry
from rlframe.megatron.model.model import Model
from rlframe.megatron.proof import replicas
from rlframe.models.config import HEAD
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files import write_whole, writing

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""What Megatron's own training would have to know to read these checkpoints."""
ROOM_BYTES = 1 << 16
"""More than Megatron writes to its small files."""
SAVED_AS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Tensors of the optimizer, by the name that DistributedOptimizer gives them and that in Megatron's checkpoints."""


def stage(
    model: Model,
    optimizer: MegatronOptimizer | None,
    folder: Path,
    *,
    copy: bool,
    reference: ReferenceWeights | None = None,
) -> Staged:
    """What this rank has to write into `folder`, which exists. All ranks call it together.

    Args:
        optimizer: None saves weights only.
        reference: one that follows the policy, and so is not what the run began with.
        copy: take a copy in host memory, so that training may go on before the files are written.

    Raises:
        WeightsDrifted: copies of something, on several ranks, have drifted apart.
    """
    weights = weights_by_chunk(model)
    state: dict[str, Any] = dict(weights)
    if optimizer is not None:
        for part in parts(optimizer):
            # A policy whose critic warms up has not taken a step.
            if not part.optimizer.state:
                allocate_moments(part)
        state["optimizer"] = [
            [rectangle for _, _, rectangles in part_state(part, weights) for rectangle in rectangles]
            for part in parts(optimizer)
        ]
    if reference is not None:
        state |= reference_by_chunk(model, reference)
    replicas.require_equal(state, step_counts(optimizer) if optimizer is not None else ())
    staged = plan(state, folder)
    if copy:
        staged.stage_on_host()
    return staged


def complete(staged: Staged, written: list[Written]) -> None:
    """The end of a save, with what all ranks wrote; does something on rank 0 only."""
    if staged.metadata is not None:
        seal(staged, written)


@torch.no_grad()
def load(
    model: Model,
    optimizer: MegatronOptimizer,
    folder: Path,
    *,
    num_optimizer_steps: int,
    reference: ReferenceWeights | None = None,
) -> None:
    """Read this rank's part back, in place.

    Args:
        num_optimizer_steps: taken before the state was saved; at least 1.
        reference: one that follows the policy, to be read too.

    Raises:
        CheckpointError: what is in `folder` is of another model.
    """
    weights = weights_by_chunk(model)
    states = []
    for part in parts(optimizer):
        allocate_moments(part)
        states.append(list(part_state(part, weights)))
    rectangles = [[rectangle for *_, own in state for rectangle in own] for state in states]
    put(model, read({**weights, "optimizer": rectangles}, folder))
    for part, state in zip(parts(optimizer), states, strict=True):
        for parameter, tensors, _ in state:
            part._set_main_param_and_optimizer_states(parameter, tensors)
        if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            part.optimizer._sync_hdo_state_to_sub_optimizers()
        set_step_count(part.optimizer, num_optimizer_steps)
    if reference is not None:
        load_reference(model, reference, folder)


def load_weights(model: Model, optimizer: MegatronOptimizer, folder: Path) -> None:
    """Read weights only, from a checkpoint with or without moments; the main weights become the same. A head that the
    checkpoint lacks, for it is of a language model, stays as it is.

    Raises:
        CheckpointError: what is in `folder` is of another model.
    """
    # Of a model with adapters, the base: Megatron's own entries know nothing of adapters.
    weights = {name: sharded_weights(chunk.module) for name, chunk in chunks_by_key(model).items()}
    put(model, read(weights, folder, needs_head=False))
    optimizer.reload_model_params()


def weights_by_chunk(model: Model) -> dict[str, Any]:
    """What a checkpoint holds of the model's weights: all, or what is trained where the rest is frozen."""
    found = {}
    for name, chunk in chunks_by_key(model).items():
        weights = sharded_weights(chunk.module)
        found[name] = lora_state.sharded_state(model.lora, chunk.module, weights) if model.lora else weights
    return found


def reference_by_chunk(model: Model, reference: ReferenceWeights) -> dict[str, Any]:
    """Returns what a checkpoint holds of a reference that follows the policy: the float32 values of each weight, with
    its place in the whole, under the weight's name behind `reference.`."""
    found: dict[str, Any] = {}
    for name, chunk in chunks_by_key(model).items():
        entries = found[f"reference_{name}"] = {}
        for key, value in sharded_weights(chunk.module).items():
            exact = reference.exact_of(value.data) if isinstance(value.data, Tensor) else None
            if exact is None:
                continue
            of_exact = {"dtype": exact.dtype} if isinstance(value, ShardedTensor) else {}
            entries[key] = replace(value, key=f"reference.{value.key}", data=exact, **of_exact)
    return found


def load_reference(model: Model, reference: ReferenceWeights, folder: Path) -> None:
    """Reads into `reference` what `reference_by_chunk` had saved of one.

    Raises:
        CheckpointError: the checkpoint in `folder` has none, or that of another model.
    """
    state = reference_by_chunk(model, reference)
    places = {(name, key): value.data for name, entries in state.items() for key, value in entries.items()}
    loaded = read(state, folder)
    for (name, key), exact in places.items():
        exact.copy_(loaded[name][key])
    reference.round()


def put(model: Model, loaded: dict[str, Any]) -> None:
    """The values of `weights_by_chunk` that were read, into the modules."""
    for name, chunk in chunks_by_key(model).items():
        # Beside adapters either they or the base is not in them.
        chunk.module.load_state_dict(loaded[name], strict=model.lora is None)


def chunks_by_key(model: Model) -> dict[str, DistributedDataParallel]:
    """The chunks of the model under `model`, or where there are several under `model0`, `model1` and so on. Tensors are
    stored under names of their own, so a state of one chunk loads into several and the other way round."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(model.chunks)}


def sharded_weights(module: Any) -> dict[str, Any]:
    """This rank's weights and buffers in a Megatron module, each with its place in the whole."""
    # A copy: Megatron 0.16.1 adds a process group to it, and would use that one when there are new groups.
    weights = module.sharded_state_dict(metadata=dict(METADATA))
    return {name: value for name, value in weights.items() if not isinstance(value, NoEntry)}


def read(state: dict[str, Any], folder: Path, *, whole: bool = True, needs_head: bool = True) -> dict[str, Any]:
    """`state` with the values that the checkpoint in `folder` has, read into its own tensors.

    Args:
        whole: all ranks together ask for whole tensors, which is checked.
        needs_head: a head that is not of the vocabulary must be there too.
    """
    try:
        reader = reading.Reader(folder)
        for name, weights in state.items():
            if name != "optimizer":
                own_extras_where_none_are_stored(weights, reader.names)
                if not needs_head and HEAD not in reader.names:
                    own_head(weights)
        return reading.load(state, reader, whole=whole)
    except (CheckpointingException, KeyError) as error:
        raise CheckpointError(f"{folder} does not hold this model: {error}") from error
    except CheckpointException as error:
        # Of torch's, which holds the error of each rank with its traceback.
        failures = [cause for cause, _ in error.failures.values()]
        for cause in failures:
            if isinstance(cause, CheckpointError):
                raise cause from error
        causes = "; ".join(map(str, failures))
        raise CheckpointError(f"{folder} does not hold this model: {causes}") from error


def own_extras_where_none_are_stored(weights: dict[str, Any], stored: set[str]) -> None:
    """Transformer Engine's modules keep a state of their own (FP8 scales), which a checkpoint written on a CPU, or at
    another tensor-parallel size, does not have: they then keep what they have."""
    for name, value in weights.items():
        if isinstance(value, ShardedObject) and value.unique_key not in stored:
            weights[name] = LocalNonpersistentObject(value.data)


def own_head(weights: dict[str, Any]) -> None:
    """The head, if it is one of values, keeps what it has."""
    for name, value in weights.items():
        if isinstance(value, ShardedTensor) and value.key == HEAD:
            weights[name] = LocalNonpersistentObject(value.data)


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimizers: one for all parameters, or one for those of the experts and one for the others. An
    empty one, of a rank on which nothing of its kind is trained, is not among them."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not part.is_stub_optimizer]


def part_state(part: Any, weights: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Tensor], list[ShardedTensor]]]:
    """For each parameter of which this rank keeps moments: the parameter, the optimizer's tensors of it, and rectangles
    of the whole tensors, which are views of them."""
    pieces = pieces_by_parameter(weights)
    for parameter in part.model_param_gbuf_map:
        owned = part._get_model_param_range_map(parameter)["param"]
        tensors = part._get_main_param_and_optimizer_states(parameter)
        rectangles = [
            rectangle
            for piece in pieces[parameter]
            for name, key in SAVED_AS.items()
            for rectangle in rectangles_of(piece, parameter, owned.start, tensors[name], key)
        ]
        yield parameter, tensors, rectangles


def pieces_by_parameter(weights: dict[str, Any]) -> dict[Tensor, list[ShardedTensor]]:
    """Of each parameter, what is saved of it: itself, or the parts of a fused one, such as gate and up."""
    pieces: dict[Tensor, list[ShardedTensor]] = {}
    for value in nested_values(weights):
        if isinstance(value, ShardedTensorFactory):
            pieces[value.data] = [part for part in nested_values(value.build()) if isinstance(part, ShardedTensor)]
        elif isinstance(value, ShardedTensor) and value.data is not None:
            pieces[value.data] = [value]
    return pieces


def rectangles_of(
    piece: ShardedTensor, parameter: Tensor, first: int, values: Tensor, key: str
) -> Iterator[ShardedTensor]:
    """The parts of `piece` that `values` covers, as rectangles of the whole tensor.

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
            replica_id=(*piece.replica_id[:-1], 0),
            allow_shape_mismatch=piece.allow_shape_mismatch,
        )


def cut(begin: int, end: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(row, rows, column, width) of rectangles that hold elements `begin` to `end` of a matrix read row by row, in that
    order: the rest of a row, whole rows, the beginning of a row."""
    while begin < end:
        row, column = divmod(begin, columns)
        rows = 1 if column else max(1, (end - begin) // columns)
        width = min(end - begin, columns - column)
        yield row, rows, column, width
        begin += rows * width


class Plan(SaveShardedStrategy):
    """Plans a save up to the point where files are written: asks all ranks for their pieces, after Megatron has checked
    that these make up each whole tensor exactly once, and keeps this rank's in `staged`."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__(reading.BACKEND, 1)
        self.staged: Staged | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """See the class."""
        rank, world = dist.get_rank(), dist.get_world_size()
        # Of the copies of a piece on several ranks, one.
        mine = [piece for piece in nested_values(sharded_state_dict) if is_main_replica(piece.replica_id)]
        planner = SavePieces(mine)
        planner.set_up_planner({}, is_coordinator=rank == 0)
        local, metadata = planner.create_local_plan(), None
        gathered: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(local, gathered)
        if gathered is not None:
            _, metadata = planner.create_global_plan(gathered)
        items = [(item, planner.resolve_data(item)) for item in planner.finish_plan(local).items]
        self.staged = Staged(folder=Path(checkpoint_dir), rank=rank, items=items, metadata=metadata)


def plan(state: dict[str, Any], folder: Path) -> Staged:
    """This rank's pieces of `state`, still in the live tensors. All ranks call it together."""
    strategy = Plan()
    try:
        with writing(folder):
            dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=dict(METADATA))
    except RuntimeError:
        # Of a full disk torch says "unexpected pos 704 vs 598". The system says it plainly when it is asked again.
        room = folder / "room"
        write_whole(room, bytes(ROOM_BYTES))
        room.unlink()
        raise
    assert strategy.staged is not None
    return strategy.staged


def allocate_moments(part: Any) -> None:
    """Room for moments in an optimizer that has not taken a step."""
    if not isinstance(part.optimizer, torch.optim.Adam):
        part.load_state_dict(part.state_dict())
        return
    # Without Transformer Engine it is torch's, which Megatron 0.16 cannot prepare.
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            part.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def step_counts(optimizer: MegatronOptimizer) -> Iterator[float]:
    """How many steps Adam says it has taken, in each of its states; see `set_step_count`."""
    for part in parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield from {float(state["step"]) for state in part.optimizer.state.values()}
        else:
            yield from {float(group.get("step", 0)) for group in part.optimizer.param_groups}


def set_step_count(optimizer: torch.optim.Optimizer, count: int) -> None:
    """Tell Adam how many steps it has taken: torch's counts per parameter, Transformer Engine's per group."""
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(count))
    else:
        for group in optimizer.param_groups:
            group["step"] = count
