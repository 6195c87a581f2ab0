"""Adapters in storage: new ones, those of a PEFT folder, and their place in Megatron's distributed checkpoints."""

import pathlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

from rlframe.megatron.lora.adapters import Adapter, Lora
from rlframe.models import adapters
from rlframe.utils.errors import CheckpointError
from rlframe.weight_sync.layout.memory import load_tensor


@torch.no_grad()
def fill(lora: Lora, *, seed: int) -> None:
    """Fills the adapters from the folder of `train.lora.path`, or as new ones from the seed. Tensors trained in full
    keep the model's values unless the folder has its own.

    Raises:
        CheckpointError: the folder lacks a tensor, or has one of another shape.
    """
    for name in lora.layout.boxes:
        shape = lora.layout.tensors[name]
        if lora.config.path is not None:
            value = adapters.read(pathlib.Path(lora.config.path), name)
            if tuple(value.shape) != tuple(shape):
                raise CheckpointError(
                    f"train.lora.path: {name} has shape {list(value.shape)}, expected {list(shape)} by "
                    "the settings of train.lora"
                )
        elif any(f".{half}." in name for half in adapters.HALVES):
            value = adapters.initial(name, shape, seed=seed)
        else:
            continue
        load_tensor(lora.layout, lora.parameters, name, value)


def sharded_state(lora: Lora, module: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `module` in a checkpoint: the adapters and the tensors trained in full, not the frozen
    base.

    Args:
        weights: Megatron's own entries for the module, which are correct for all tensors but the adapters.
    """
    names = {id(parameter): name for name, parameter in lora.trained.items()}
    owners = {id(half): adapter for adapter in lora.adapters.values() for half in (*adapter.a, *adapter.b)}
    state = {}
    for path, parameter in module.named_parameters():
        if id(parameter) in owners:
            state[path] = sharded(lora, names[id(parameter)], parameter, owners[id(parameter)])
        elif id(parameter) in names and path in weights:
            state[path] = weights[path]
    return state


def without_adapters(lora: Lora, module: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Returns Megatron's own entries for `module`, which name the adapters too, without those."""
    halves = {id(half) for adapter in lora.adapters.values() for half in (*adapter.a, *adapter.b)}
    paths = {path for path, parameter in module.named_parameters() if id(parameter) in halves}
    return {path: value for path, value in weights.items() if path not in paths}


def sharded(lora: Lora, name: str, half: torch.nn.Parameter, adapter: Adapter) -> ShardedTensor:
    """Returns A or B with its place in the whole matrix of the checkpoint. The key is PEFT's name, so that a file fits
    ranks of any layout."""
    (box,), whole = lora.layout.boxes[name], lora.layout.tensors[name]
    if adapter.expert:
        tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
        data_rank = parallel_state.get_expert_data_parallel_rank()
    else:
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    is_split = tuple(half.shape) != tuple(whole)
    return ShardedTensor(
        key=f"lora.{name}",
        data=half,
        dtype=half.dtype,
        local_shape=tuple(half.shape),
        global_shape=tuple(whole),
        global_offset=(box.row, box.col),
        axis_fragmentations=tuple(size // part for size, part in zip(whole, half.shape, strict=True)),
        # One copy of each piece is the first; the others are its replicas.
        replica_id=(0, 0 if is_split else tensor_rank, data_rank),
    )
