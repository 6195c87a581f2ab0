"""Saving and loading the training state with Megatron's distributed checkpoints.

Holds weights, optimizer moments and main weights, in a form that loads into another layout too. Random state is not in
it: nothing in training draws random numbers (dropout is 0), and sampling draws from counters, not generators. Nor are
Adam's step count and the learning rate: both follow from the number of optimizer steps, which the run's state has.
"""

import pathlib
import queue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from rlframe.megatron import lora_state
from rlframe.megatron.model import Model

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(model: Model, optimizer: MegatronOptimizer, folder: pathlib.Path) -> None:
    """Write this rank's part into `folder`, which exists; returns when all ranks have written."""
    state = sharded_state(model, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(folder), sharded_strategy=OneProcess(), content_metadata=METADATA)


def load(model: Model, optimizer: MegatronOptimizer, folder: pathlib.Path, *, num_optimizer_steps: int) -> None:
    """Read this rank's part back, in place.

    Args:
        num_optimizer_steps: taken before the state was saved; at least 1.
    """
    for part in parts(optimizer):
        allocate_moments(part.optimizer)
    state = dist_checkpointing.load(sharded_state(model, optimizer, is_loading=True), str(folder))
    for name, chunk in chunks_by_key(model).items():
        # The frozen base beside adapters is not in it.
        chunk.module.load_state_dict(state[name], strict=model.lora is None)
    for part, moments in zip(parts(optimizer), state["optimizer"], strict=True):
        set_step_count(part.optimizer, None)
        part.load_parameter_state_from_fully_reshardable(moments)
        set_step_count(part.optimizer, num_optimizer_steps)


def sharded_state(model: Model, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    """What goes into a checkpoint, each tensor with its place in the whole."""
    weights = {name: sharded_weights(model, chunk) for name, chunk in chunks_by_key(model).items()}
    optimizers = [
        part.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA) for part in parts(optimizer)
    ]
    return {**weights, "optimizer": [state["param_state"] for state in optimizers]}


def sharded_weights(model: Model, chunk: DistributedDataParallel) -> dict[str, Any]:
    """The parameters of a chunk that a checkpoint holds: all, or what is trained where the rest is frozen."""
    weights = chunk.module.sharded_state_dict(metadata=METADATA)
    return lora_state.sharded_state(model.lora, chunk.module, weights) if model.lora else weights


def chunks_by_key(model: Model) -> dict[str, Any]:
    """The chunks of the model under `model`, or where there are several under `model0`, `model1` and so on. Tensors are
    stored under names of their own, so a state of one chunk loads into several and the other way round."""
    if len(model.chunks) == 1:
        return {"model": model.chunks[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(model.chunks)}


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimizers: one for all parameters, or one for those of the experts and one for the others. An
    empty one, of a rank on which nothing of its kind is trained, is not among them."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not part.is_stub_optimizer]


class OneProcess(TorchDistSaveShardedStrategy):
    """Megatron's way to write, without its helper processes: each save forks them from a process full of threads (Ray,
    gloo, CUDA), which may hang, and the first one waits seconds for a queue server. One file per rank."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, *arguments: Any) -> AsyncRequest:
        """The request that the base class at once carries out, here in this process."""
        filesystem_async._results_queue = queue.SimpleQueue()
        request = super().async_save(*arguments)
        if request.async_fn is None:
            return request
        transforms = request.async_fn.args[0]

        def write(rank: int, buckets: list[Any], results: queue.SimpleQueue) -> None:
            written: dict[int, Any] = {}
            for index, bucket in enumerate(buckets):
                answers, running = queue.SimpleQueue(), queue.Queue()
                running.put(index)
                filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                    transforms, index, bucket, answers, running, use_fsync=True
                )
                written[index] = answers.get()[1]
            failures = [answer for answer in written.values() if isinstance(answer, Exception)]
            results.put(failures[0] if failures else written)

        return request._replace(async_fn=write)


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero moments for torch's Adam, which is used without Transformer Engine: Megatron 0.16 cannot load into one that
    has not taken a step."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def set_step_count(optimizer: torch.optim.Optimizer, count: int | None) -> None:
    """Tell Adam how many steps it has taken; None removes the count, which Megatron 0.16 would look for in the file.

    torch's Adam keeps a count per parameter. Each needs a tensor of its own: Megatron loads one for all, and every
    parameter's update would add one to it. Transformer Engine's keeps a count per group.
    """
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state.pop("step", None)
            if count is not None:
                state["step"] = torch.tensor(float(count))
    elif count is not None:
        for group in optimizer.param_groups:
            group["step"] = count
