"""The layouts of vLLM's ranks, recorded from vLLM's own loader in one process; see `played_ranks`."""

import copy
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config
from rlframe.rollout.served.played_ranks import PlayedGroup, record_ranks, split_faults, without_memory
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout


def prepare() -> None:
    """Import what recording needs.

    Raises:
        ConfigError: vLLM is not installed.
    """
    # A recording's messages are its errors; vLLM would tell of an engine that is starting.
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
        # vLLM for CUDA on a machine without a device has no platform at all; its CPU one is part of every build.
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = platforms._current_platform = CpuPlatform()
    for name in ("engine.arg_utils", "model_executor.model_loader.utils"):
        importlib.import_module(f"vllm.{name}")


def faults(architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Why vLLM cannot split this model so; empty when it can."""
    return split_faults("vllm", architecture, tp=tp, ep=ep)


def engine_layouts(folder: Path, *, dtype: torch.dtype, tp: int = 1, ep: bool = False) -> list[MemoryLayout]:
    """The layout of each of the `tp` ranks of an engine, in the order of ranks.

    Args:
        folder: needs config.json only.
        ep: whole experts are shared out over the ranks, instead of a slice of each.

    Raises:
        ConfigError: vLLM is not installed, or cannot split the model so.
        WeightSyncFailed: vLLM's loader does what no copy plan can repeat; says what.
    """
    prepare()
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    if found := faults(architecture, tp=tp, ep=ep):
        raise ConfigError(found)
    config = _config(folder, dtype=dtype, tp=tp, ep=ep)
    return record_ranks(family.tensors(architecture), tp=tp, play=lambda rank: _play(rank, tp, config, dtype))


def _config(folder: Path, *, dtype: torch.dtype, tp: int, ep: bool) -> Any:
    """vLLM's own configuration of such an engine."""
    arguments: Any = importlib.import_module("vllm.engine.arg_utils")
    return arguments.EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=tp,
        enable_expert_parallel=ep,
        # Named, so that vLLM does not look for as many devices as there are ranks, nor for Ray.
        distributed_executor_backend="mp",
        enforce_eager=True,
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
    """For a while this process is rank `rank` of one engine of `size` ranks, as far as vLLM's layers can tell.

    Raises:
        ConfigError: the process is a rank of a real engine already.
    """
    from vllm.distributed import parallel_state

    split, whole = ("_WORLD", "_TP", "_EP"), ("_PP", "_DP", "_DCP", "_PCP", "_INNER_DP_WORLD")
    # Which groups there are differs from version to version.
    names = [name for name in split + whole if hasattr(parallel_state, name)]
    if any(getattr(parallel_state, name) is not None for name in names):
        raise ConfigError(
            [
                Fault(
                    "rollout.name",
                    got="vllm",
                    stated=True,
                    said="an engine runs in this process, so no other rank can be played in it",
                )
            ]
        )
    try:
        for name in names:
            setattr(parallel_state, name, PlayedGroup(rank, size) if name in split else PlayedGroup(0, 1))
        yield
    finally:
        for name in names:
            setattr(parallel_state, name, None)
