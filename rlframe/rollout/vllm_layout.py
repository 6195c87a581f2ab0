"""The layouts of vLLM's ranks, recorded from vLLM's own loader in one process, without a device and without weights.

Building a model and loading into it need no communication: layers ask only for the rank and the size of their group.
So each rank's model is built in turn, with stand-ins for the groups and with parameters that have no memory.

What is recorded is the memory as the loader leaves it. An engine that repacks its weights afterwards (FlashInfer's
experts, CPU prepacking, FP8) is found out by the calibration of the running engine, and is then served by `stream`.
"""

import copy
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config
from rlframe.utils.errors import ConfigError
from rlframe.weight_sync.layout import Layout, record_loader


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
            ["rollout.name=vllm: the package vllm is not installed: pip install 'rlframe[vllm]'"]
        ) from error
    if not platforms.current_platform.device_type:
        # vLLM for CUDA on a machine without a device has no platform at all; its CPU one is part of every build.
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = platforms._current_platform = CpuPlatform()
    for name in ("engine.arg_utils", "model_executor.model_loader.utils"):
        importlib.import_module(f"vllm.{name}")


def faults(architecture: Architecture, *, tp: int, ep: bool) -> list[str]:
    """Why vLLM cannot split this model so; empty when it can."""
    name, heads, kv_heads = architecture.model_type, architecture.num_attention_heads, architecture.num_kv_heads
    ffn, expert_ffn = architecture.ffn_hidden_size, architecture.expert_ffn_hidden_size
    found = []
    if heads % tp:
        found.append(f"tp {tp} must divide num_attention_heads {heads} of {name}")
    if kv_heads % tp and tp % kv_heads:
        found.append(f"tp {tp} must divide num_kv_heads {kv_heads} of {name} or be a multiple of it")
    if not all(architecture.moe_layers) and ffn % tp:
        found.append(f"tp {tp} must divide ffn_hidden_size {ffn} of {name}")
    if architecture.num_experts and not ep and expert_ffn % tp:
        found.append(f"tp {tp} must divide expert_ffn_hidden_size {expert_ffn} of {name}, or ep be set")
    if ep and not architecture.num_experts:
        found.append(f"ep needs experts, and {name} is dense")
    return [f"rollout.name=vllm: {fault}" for fault in found]


def engine_layouts(folder: Path, *, dtype: torch.dtype, tp: int = 1, ep: bool = False) -> list[Layout]:
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
    tensors, config = family.tensors(architecture), _config(folder, dtype=dtype, tp=tp, ep=ep)
    from vllm.config import set_current_vllm_config

    layouts = []
    for rank in range(tp):
        mine = copy.deepcopy(config)  # a built model registers its layers in it
        with _stand_in_groups(rank, tp), set_current_vllm_config(mine):
            model = _build(mine, dtype)
            layouts.append(record_loader(model.load_weights, dict(model.named_parameters()), tensors))
    return layouts


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


def _build(config: Any, dtype: torch.dtype) -> Any:
    """The model, its parameters without memory."""
    from vllm.model_executor.model_loader.utils import initialize_model

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _EmptyWithoutMemory():
            return initialize_model(config)
    finally:
        torch.set_default_dtype(before)


class _EmptyWithoutMemory(TorchFunctionMode):
    """What is made uninitialised lies on the meta device: parameters. Tables with content, such as which rank has which
    expert, are real, for the loader reads them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@dataclass
class _Group:
    """What layers ask of vLLM's `GroupCoordinator` while they are built and loaded, and of its process groups."""

    rank_in_group: int
    world_size: int
    device_communicator: None = None
    ranks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = list(range(self.world_size))
        self.rank = self.local_rank = self.rank_in_group
        self.device_group = self.cpu_group = self
        self.is_first_rank = self.rank == 0
        self.is_last_rank = self.rank == self.world_size - 1
        self.device = torch.device("cpu")

    def size(self) -> int:
        """As a process group answers."""
        return self.world_size


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
        raise ConfigError(["rollout.name=vllm: an engine runs in this process, so no other rank can be played in it"])
    try:
        for name in names:
            setattr(parallel_state, name, _Group(rank, size) if name in split else _Group(0, 1))
        yield
    finally:
        for name in names:
            setattr(parallel_state, name, None)
