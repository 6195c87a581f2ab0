"""Saving and loading the training state with Megatron's distributed checkpoints.

Holds weights, optimizer moments and main weights, in a form that loads into another layout too. Random state is not in
it: nothing in training draws random numbers (dropout is 0), and sampling draws from counters, not generators. Nor are
Adam's step count and the learning rate: both follow from the number of optimizer steps, which the run's state has.
"""

import pathlib
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer

from rlframe.megatron.model import Model

SHARDING = "fully_reshardable"
METADATA = {"distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True}


def save(model: Model, optimizer: MegatronOptimizer, folder: pathlib.Path) -> None:
    """Write this rank's part into `folder`, which exists; returns when all ranks have written."""
    dist_checkpointing.save(sharded_state(model, optimizer, is_loading=False), str(folder), content_metadata=METADATA)


def load(model: Model, optimizer: MegatronOptimizer, folder: pathlib.Path, *, num_optimizer_steps: int) -> None:
    """Read this rank's part back, in place.

    Args:
        num_optimizer_steps: taken before the state was saved; at least 1.
    """
    for part in parts(optimizer):
        allocate_moments(part.optimizer)
    state = dist_checkpointing.load(sharded_state(model, optimizer, is_loading=True), str(folder))
    model.ddp.module.load_state_dict(state["model"])
    for part, moments in zip(parts(optimizer), state["optimizer"], strict=True):
        # The groups are this layout's own: another one may have had more or fewer optimizers, so groups of its own.
        groups = part.state_dict()
        for group in groups["optimizer"]["param_groups"]:
            group["step"] = num_optimizer_steps
        part.load_state_dict(groups | {"param_state": moments, "param_state_sharding_type": SHARDING})
        set_step_counts(part.optimizer, num_optimizer_steps)


def sharded_state(model: Model, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    """What goes into a checkpoint, each tensor with its place in the whole."""
    weights = model.ddp.module.sharded_state_dict(metadata=METADATA)
    optimizers = [part.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA) for part in parts(optimizer)]
    return {"model": weights, "optimizer": [state["param_state"] for state in optimizers]}


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimizers: one for all parameters, or one for those of the experts and one for the others."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero moments, for torch's Adam (used without Transformer Engine): Megatron 0.16 asks it for its step count before
    it loads, which a fresh one does not have."""
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def set_step_counts(optimizer: torch.optim.Optimizer, count: int) -> None:
    """A count of its own for every parameter of torch's Adam: Megatron 0.16 loads one tensor for all of them, and each
    parameter's update would add one to it."""
    if isinstance(optimizer, torch.optim.Adam):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(count))
