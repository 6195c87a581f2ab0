"""The layout of the transformers engine, recorded from its own loader without a device and without weights."""

import importlib
from pathlib import Path

import torch

from rlframe.models import transformers_config
from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout, record


def prepare() -> None:
    """Imports the modules that recording needs."""
    importlib.import_module("transformers.models.auto.modeling_auto")


def faults(architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Returns a fault for every reason why the engine cannot split the model."""
    asked = [f"tp {tp}"] if tp > 1 else []
    asked += ["ep"] if ep else []
    return [
        Fault(
            "rollout.name",
            got="transformers",
            stated=True,
            said=f"the transformers engine is one process and does not support {each}; use vllm or sglang",
        )
        for each in asked
    ]


def engine_layouts(folder: Path, *, dtype: torch.dtype, tp: int = 1, ep: bool = False) -> list[MemoryLayout]:
    """Returns the layout of the engine's one rank. `folder` needs config.json only.

    Raises:
        ConfigError: `tp` is above 1 or `ep` is set.
    """
    from transformers import AutoModelForCausalLM

    from rlframe.rollout.transformers.engine import load_weights, weights_of

    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    if found := faults(architecture, tp=tp, ep=ep):
        raise ConfigError(found)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config.read(folder), dtype=dtype)
    return [record(load_weights, weights_of(model), family.tensors(architecture))]
