"""What lets one process play each rank of an engine of many, without a device and without weights.

Building a model and loading into it need no communication: layers ask only for the rank and the size of their group.
So each rank's model is built in turn, with stand-ins for the groups and with parameters that have no memory.

What is recorded is the memory as the loader leaves it. An engine that repacks its weights afterwards (FlashInfer's
experts, CPU prepacking, FP8) is found out by the calibration of the running engine, and is then served by `stream`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlframe.models.families.base import Architecture
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout, record_loader


def split_faults(engine: str, architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Why an engine cannot split this model so, by the rules that vLLM and SGLang share; empty when it can.

    Args:
        ep: whole experts are shared out over the ranks, instead of a slice of each.
    """
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
    return [Fault("rollout.name", got=engine, stated=True, said=fault) for fault in found]


def record_ranks(
    tensors: Mapping[str, tuple[int, ...]], *, tp: int, play: Callable[[int], AbstractContextManager[Any]]
) -> list[MemoryLayout]:
    """The layout of each of the `tp` ranks of an engine, in the order of ranks.

    Args:
        tensors: shape of every tensor of the checkpoint.
        play: gives the model of a rank, and inside its `with` the process is that rank as far as layers can tell.

    Raises:
        WeightSyncFailed: the engine's loader does what no copy plan can repeat; says what.
    """
    layouts = []
    for rank in range(tp):
        with play(rank) as model:
            layouts.append(record_loader(model.load_weights, dict(model.named_parameters()), tensors))
    return layouts


@contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Inside, models are built of `dtype` and their parameters on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _EmptyWithoutMemory():
            yield
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
class PlayedGroup:
    """What layers ask of the engine's `GroupCoordinator` while they are built and loaded, and of its process groups;
    SGLang's class was once vLLM's."""

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
