"""Saving and loading the training state with Megatron's distributed checkpoints, in a form that any layout can load.

It holds weights, the optimizer's moments and main weights, a reference that follows the policy, and the gradient norms
by which steps are skipped. Random state is not part of
it: nothing in training draws random numbers (dropout is 0), and sampling draws from counters, not generators. Nor are
Adam's step count and the learning rate: both follow from the number of optimizer steps, which the run's state has, and
of those that were skipped.

Saving is three calls: `stage` on all ranks at once, which plans and may copy the state to host memory; `write` on each
by itself, from any thread; and `files.seal` on rank 0 with what the others wrote. Megatron 0.16's own way forks helper
processes at each save from a process full of threads (Ray, gloo, CUDA), which may hang.

The optimizer's state is saved and loaded by the ranks that own it, each its ranges of each parameter as rectangles of
the whole tensor, under the names of Megatron's `fully_reshardable` format. Megatron itself gathers that state first, on
every data-parallel rank in host memory and a buffer at a time on the GPU: four times the model in float32, twice.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlframe.megatron.checkpoint import reading
from rlframe.megatron.checkpoint.files import Written, seal
from rlframe.megatron.checkpoint.moments import (
    allocate_moments,
    give_back,
    has_moments,
    owned,
    part_state,
    parts,
    set_step_count,
    step_counts,
)
from rlframe.megatron.checkpoint.pieces import SavePieces
from rlframe.megatron.checkpoint.staging import HostMemory, Staged
from rlframe.megatron.lora import state as lora_state
from rlframe.megatron.memory.reference import ReferenceWeights
from rlframe.megatron.model.layers.heads import NoEntry
from rlframe.megatron.model.model import Model
from rlframe.megatron.proof import replicas
from rlframe.megatron.skipping.outliers import Outliers
from rlframe.models.config import HEAD
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.whole import write_whole, writing

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Metadata with which Megatron's own training could read these checkpoints."""
STATE_BYTES = 12
"""Bytes of a parameter's main weight and moments, at most."""
REFERENCE_BYTES = 4
"""Bytes of a parameter of a reference that follows the policy."""
BODY = ("embedding.", "decoder.")
WEIGHTS = (*BODY, "output_layer.")
"""Beginnings of the names of weights in a checkpoint: of all but the output layer, and of all. Those of a head for
multi-token prediction, which a model may leave out, and of a head of values begin otherwise."""
ROOM_BYTES = 1 << 16
"""Bound in bytes of Megatron's small files."""


def stage(
    model: Model,
    optimizer: MegatronOptimizer | None,
    folder: Path,
    *,
    copy_to: HostMemory | None,
    reference: ReferenceWeights | None = None,
    outliers: Outliers | None = None,
) -> Staged:
    """Returns the data that this rank has to write into the existing `folder`. All ranks must call it together.

    Args:
        optimizer: None saves weights only.
        reference: a reference that follows the policy, and so has changed since the run began.
        outliers: the gradient norms by which steps are skipped.
        copy_to: where to copy the data, so that training may continue before the files are written. None writes the
            live data.

    Raises:
        WeightsDrifted: copies on several ranks differ.
    """
    weights = weights_by_chunk(model)
    state: dict[str, Any] = dict(weights)
    if optimizer is not None:
        for part in parts(optimizer):
            # A policy whose critic warms up has not taken a step.
            if not has_moments(part):
                allocate_moments(part)
        state["optimizer"] = [
            [rectangle for _, _, rectangles in part_state(part, weights) for rectangle in rectangles]
            for part in parts(optimizer)
        ]
        if outliers:
            state["outliers"] = outliers.state()
    if reference is not None:
        state |= reference_by_chunk(model, reference)
    replicas.require_equal(state, step_counts(optimizer) if optimizer is not None else ())
    staged = plan(state, folder)
    if copy_to:
        staged.stage_on_host(copy_to)
    return staged


def state_bytes(model: Model, optimizer: MegatronOptimizer, *, follows: bool) -> int:
    """Returns a bound of the bytes that this rank has to write, also before the first step.

    Args:
        follows: whether a reference follows the policy.
    """
    weights = list((model.lora.parameters if model.lora else model.parameters).values())
    found = sum(parameter.nbytes for parameter in weights)
    for part in parts(optimizer):
        found += sum(STATE_BYTES * (place.stop - place.start) for _, place, _ in owned(part))
    return found + follows * sum(REFERENCE_BYTES * parameter.numel() for parameter in weights)


def complete(staged: Staged, written: list[Written]) -> None:
    """Ends a save, with the results of all ranks. Only rank 0 does anything."""
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
    outliers: Outliers | None = None,
) -> None:
    """Reads this rank's part back, in place.

    Args:
        num_optimizer_steps: number of optimizer steps before the state was saved; at least 1.
        reference: a reference that follows the policy, which is read too.
        outliers: the gradient norms by which steps are skipped, which are read too.

    Raises:
        CheckpointError: the checkpoint in `folder` belongs to another model.
    """
    weights = weights_by_chunk(model)
    states = []
    for part in parts(optimizer):
        allocate_moments(part)
        states.append(list(part_state(part, weights)))
    rectangles = [[rectangle for *_, own in state for rectangle in own] for state in states]
    norms = {"outliers": outliers.state()} if outliers else {}
    loaded = read({**weights, "optimizer": rectangles, **norms}, folder)
    put(model, loaded)
    if outliers:
        outliers.load(loaded["outliers"])
        num_optimizer_steps -= outliers.skipped
    for part, state in zip(parts(optimizer), states, strict=True):
        give_back(part, state)
        set_step_count(part.optimizer, num_optimizer_steps)
    if reference is not None:
        load_reference(model, reference, folder)


def load_weights(model: Model, folder: Path) -> None:
    """Reads weights only, from a checkpoint with or without moments; of a model with adapters, the base. A head that
    the checkpoint of a language model lacks is unchanged. The optimizer must be told (`reload_model_params`).

    Raises:
        CheckpointError: the checkpoint in `folder` belongs to another model.
    """
    weights = {name: sharded_weights(chunk.module) for name, chunk in chunks_by_key(model).items()}
    if model.lora:
        for name, chunk in chunks_by_key(model).items():
            weights[name] = lora_state.without_adapters(model.lora, chunk.module, weights[name])
    reading.require_vocabulary(reading.Reader(folder), model.architecture.vocab_size)
    exhausted = WEIGHTS if model.architecture.num_outputs is None else BODY
    put(model, read(weights, folder, needs_head=False, exhausted=exhausted))


def weights_by_chunk(model: Model) -> dict[str, Any]:
    """Returns the entries of the model's weights in a checkpoint: all, or the trained ones if the rest is frozen."""
    found = {}
    for name, chunk in chunks_by_key(model).items():
        weights = sharded_weights(chunk.module)
        found[name] = lora_state.sharded_state(model.lora, chunk.module, weights) if model.lora else weights
    return found


def reference_by_chunk(model: Model, reference: ReferenceWeights) -> dict[str, Any]:
    """Returns the entries of a reference that follows the policy: the float32 values of each weight, with its place in
    the whole, under the weight's name with the prefix `reference.`."""
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
    """Reads into `reference` the entries of `reference_by_chunk`. Routing biases stay as they are if the checkpoint,
    of an earlier release, has none of a reference.

    Raises:
        CheckpointError: the checkpoint in `folder` has no reference, or belongs to another model.
    """
    stored = reading.Reader(folder).names
    state = {
        name: {
            key: value
            for key, value in entries.items()
            if value.key in stored or not value.key.endswith("router.expert_bias")
        }
        for name, entries in reference_by_chunk(model, reference).items()
    }
    places = {(name, key): value.data for name, entries in state.items() for key, value in entries.items()}
    loaded = read(state, folder)
    for (name, key), exact in places.items():
        exact.copy_(loaded[name][key])
    reference.round()


def put(model: Model, loaded: dict[str, Any]) -> None:
    """Stores the read values of `weights_by_chunk` in the modules."""
    for name, chunk in chunks_by_key(model).items():
        # Beside adapters either they or the base is not in them, and on some stages nothing is trained.
        chunk.module.load_state_dict(loaded.get(name, {}), strict=model.lora is None)


def chunks_by_key(model: Model) -> dict[str, Any]:
    """Returns the chunks of the model under `model`, or several under `model0`, `model1` and so on. Tensors are stored
    under names of their own, so that a state of one chunk loads into several and vice versa."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(model.chunks)}


def sharded_weights(module: Any) -> dict[str, Any]:
    """Returns this rank's weights and buffers in a Megatron module, each with its place in the whole."""
    # A copy: Megatron 0.16.1 adds a process group to it, and would use that one when there are new groups.
    weights = module.sharded_state_dict(metadata=dict(METADATA))
    return {name: value for name, value in weights.items() if not isinstance(value, NoEntry)}


def read(
    state: dict[str, Any],
    folder: Path,
    *,
    whole: bool = True,
    needs_head: bool = True,
    exhausted: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Returns `state` with the values of the checkpoint in `folder`, read into its own tensors.

    Args:
        whole: whether all ranks together request whole tensors, which is checked.
        needs_head: whether a head that is not over the vocabulary must be present too.
        exhausted: see `reading.load`.
    """
    try:
        reader = reading.Reader(folder)
        for name, weights in state.items():
            if name != "optimizer":
                own_extras_where_none_are_stored(weights, reader.names)
                if not needs_head and HEAD not in reader.names:
                    own_head(weights)
        return reading.load(state, reader, whole=whole, exhausted=exhausted)
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
    """Keeps the states of Transformer Engine's modules (FP8 scales) that the checkpoint lacks, because it was written
    on a CPU or at another tensor-parallel size."""
    for name, value in weights.items():
        if isinstance(value, ShardedObject) and value.unique_key not in stored:
            weights[name] = LocalNonpersistentObject(value.data)


def own_head(weights: dict[str, Any]) -> None:
    """Keeps the head, if it is one of values."""
    for name, value in weights.items():
        if isinstance(value, ShardedTensor) and value.key == HEAD:
            weights[name] = LocalNonpersistentObject(value.data)


def plan(state: dict[str, Any], folder: Path) -> Staged:
    """Returns this rank's pieces of `state`, still in the live tensors, after Megatron has checked that the pieces of
    all ranks make up each whole tensor exactly once. All ranks must call it together."""
    pieces, _ = save_preprocess(state)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_small_files(folder)
    # Of the copies of a piece on several ranks, one.
    mine = [piece for piece in nested_values(pieces) if is_main_replica(piece.replica_id)]
    planner = SavePieces(mine)
    planner.set_up_planner({}, is_coordinator=rank == 0)
    local, metadata = planner.create_local_plan(), None
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(local, gathered)
    if gathered is not None:
        _, metadata = planner.create_global_plan(gathered)
    items = [(item, planner.resolve_data(item)) for item in planner.finish_plan(local).items]
    return Staged(folder=folder, rank=rank, items=items, metadata=metadata)


def write_small_files(folder: Path) -> None:
    """Writes what makes Megatron take `folder` for a checkpoint: the name of the format, and METADATA in `common.pt`,
    where 0.16 expects it and 0.19 still finds it."""
    try:
        with writing(folder):
            torch.save({"content_metadata": METADATA}, folder / "common.pt")
            save_config(CheckpointingConfig(sharded_backend=reading.BACKEND), str(folder))
    except RuntimeError:
        # Of a full disk torch says "unexpected pos 704 vs 598". The system says it plainly when it is asked again.
        room = folder / "room"
        write_whole(room, bytes(ROOM_BYTES))
        room.unlink()
        raise
