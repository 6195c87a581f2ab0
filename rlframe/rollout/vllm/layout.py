"""The layouts of vLLM's ranks, recorded from vLLM's own loader in one process; see `simulated_ranks`."""

import copy
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.served.plain import plain_config
from rlframe.rollout.served.quantized import formats, shapes, stated_format
from rlframe.rollout.served.simulated_ranks import SimulatedGroup, record_ranks, split_faults, without_memory
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout


def prepare() -> None:
    """Imports the modules that recording needs.

    Raises:
        ConfigError: vLLM is not installed.
    """
    # A recording reports through its errors; vLLM's log would read as if an engine were starting.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        platforms: Any = importlib.import_module("vllm.platforms")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError(
            [
                Fault(
                    "rollout.name",
                    got="vllm",
                    stated=True,
                    said="the package vllm is not installed: pip install 'rlframe[vllm]'",
                )
            ]
        ) from error
    if not platforms.current_platform.device_type:
        # A vLLM built for CUDA finds no platform on a machine without a device; its CPU platform is part of every
        # build.
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = platforms._current_platform = CpuPlatform()
    for name in ("engine.arg_utils", "model_executor.model_loader.utils"):
        importlib.import_module(f"vllm.{name}")


def faults(architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Returns a fault for every reason why vLLM cannot split this model."""
    return split_faults("vllm", architecture, tp=tp, ep=ep)


def weights(model: Any) -> dict[str, Tensor]:
    """Returns the parameters that hold weights. Those for scales of keys and values, which vLLM makes for checkpoints
    that have such scales, are none: vLLM reads them at the end of loading and deletes them."""
    from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter

    return {name: each for name, each in model.named_parameters() if not isinstance(each, KVCacheScaleParameter)}


def engine_layouts(
    folder: Path,
    *,
    dtype: torch.dtype,
    tp: int = 1,
    ep: bool = False,
    engine_format: EngineFormat = EngineFormat.NONE,
) -> list[MemoryLayout]:
    """Returns the layout of each of the `tp` ranks of an engine, in the order of ranks.

    Args:
        folder: needs config.json only.
        ep: each rank holds whole experts, instead of a slice of each.
        engine_format: number format of matrices in layers. On a machine without GPUs other than NONE needs a CPU with
            AMX.

    Raises:
        ConfigError: vLLM is not installed, or cannot split the model over `tp` ranks.
        WeightSyncFailed: vLLM's loader does something no copy plan can repeat, which the message names.
    """
    prepare()
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    if found := faults(architecture, tp=tp, ep=ep):
        raise ConfigError(found)
    config = _config(folder, dtype=dtype, tp=tp, ep=ep, engine_format=engine_format)
    tensors = shapes(family.tensors(architecture), engine_format)
    dtypes = None if engine_format is EngineFormat.NONE else formats(tensors, dtype)
    return record_ranks(
        tensors, tp=tp, play=lambda rank: _play(rank, tp, config, dtype), parameters=weights, dtypes=dtypes
    )


def _config(
    folder: Path, *, dtype: torch.dtype, tp: int, ep: bool, engine_format: EngineFormat = EngineFormat.NONE
) -> Any:
    """Returns vLLM's own configuration of an engine with these settings."""
    arguments: Any = importlib.import_module("vllm.engine.arg_utils")
    return arguments.EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=tp,
        enable_expert_parallel=ep,
        # Set explicitly, so that vLLM looks neither for one device per rank nor for Ray.
        distributed_executor_backend="mp",
        enforce_eager=True,
        hf_overrides=partial(plain_config, overrides=stated_format(folder, engine_format)),
    ).create_engine_config()


@contextmanager
def _play(rank: int, tp: int, config: Any, dtype: torch.dtype) -> Iterator[Any]:
    """See `record_ranks`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    mine = copy.deepcopy(config)  # a built model registers its layers in it
    with _stand_in_groups(rank, tp), set_current_vllm_config(mine):
        with without_memory(dtype):
            model = initialize_model(mine)
        yield model


@contextmanager
def _stand_in_groups(rank: int, size: int) -> Iterator[None]:
    """Makes this process rank `rank` of an engine of `size` ranks inside the `with`, as far as vLLM's layers can see.

    Raises:
        ConfigError: the process is a rank of a real engine already.
    """
    from vllm.distributed import parallel_state

    split, whole = ("_WORLD", "_TP", "_EP"), ("_PP", "_DP", "_DCP", "_PCP", "_INNER_DP_WORLD")
    # vLLM's groups differ between versions.
    names = [name for name in split + whole if hasattr(parallel_state, name)]
    if any(getattr(parallel_state, name) is not None for name in names):
        raise ConfigError(
            [
                Fault(
                    "rollout.name",
                    got="vllm",
                    stated=True,
                    said="an engine runs in this process, so no other rank can be simulated in it; "
                    "record layouts in another process",
                )
            ]
        )
    try:
        for name in names:
            setattr(parallel_state, name, SimulatedGroup(rank, size) if name in split else SimulatedGroup(0, 1))
        yield
    finally:
        for name in names:
            setattr(parallel_state, name, None)
