"""Saving and loading the training state with Megatron's distributed checkpoints.

Holds weights, optimizer moments and main weights, in a form that loads into another layout too. Random state is not in
it: nothing in training draws random numbers (dropout is 0), and sampling draws from counters, not generators.
"""

import pathlib
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer

from rlframe.megatron.model import Model

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(model: Model, optimizer: MegatronOptimizer, folder: pathlib.Path) -> None:
    """Write this rank's part into `folder`, which exists; returns when all ranks have written."""
    dist_checkpointing.save(sharded_state(model, optimizer, is_loading=False), str(folder), content_metadata=METADATA)


def load(model: Model, optimizer: MegatronOptimizer, folder: pathlib.Path) -> None:
    """Read this rank's part back, in place."""
    state = dist_checkpointing.load(sharded_state(model, optimizer, is_loading=True), str(folder))
    model.ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def sharded_state(model: Model, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    """What goes into a checkpoint, each tensor with its place in the whole."""
    weights = model.ddp.module.sharded_state_dict(metadata=METADATA)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA),
    }
