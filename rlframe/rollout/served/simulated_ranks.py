"""Simulates each rank of a tensor-parallel engine in one process, without a device and without weights.

Building a model and loading into it need no communication: layers ask only for rank and size of their group. So each
rank's model is built in turn, with stand-ins for the groups and with parameters that have no memory.

The recorded layout is the memory as the loader leaves it. The calibration of the running engine detects an engine that
repacks its weights afterwards (FlashInfer's experts, CPU prepacking, FP8); such an engine is then served by `stream`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlframe.models.families.base import Architecture
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout, record_loader


def split_faults(engine: str, architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Returns a fault for every reason why an engine cannot split this model, by the rules that vLLM and SGLang share.

    Args:
        ep: each rank holds whole experts, instead of a slice of each.
    """
    name, heads, kv_heads = architecture.model_type, architecture.num_attention_heads, architecture.num_kv_heads
    ffn, expert_ffn = architecture.ffn_hidden_size, architecture.expert_ffn_hidden_size
    found = []
    if heads % tp:
        found.append(f"tp {tp} must divide num_attention_heads {heads} of {name}")
    if kv_heads % tp and tp % kv_heads:
        found.append(f"tp {tp} must divide num_kv_heads {kv_heads} of {name} or be a multiple of it")
    if architecture.gated_delta_net and architecture.gated_delta_net.num_key_heads % tp:
        keys = architecture.gated_delta_net.num_key_heads
        found.append(f"tp {tp} must divide linear_num_key_heads {keys} of {name}")
    if not all(architecture.moe_layers) and ffn % tp:
        found.append(f"tp {tp} must divide ffn_hidden_size {ffn} of {name}")
    if architecture.num_experts and not ep and expert_ffn % tp:
        found.append(f"tp {tp} must divide expert_ffn_hidden_size {expert_ffn} of {name}, or ep be set")
    if ep and not architecture.num_experts:
        found.append(f"ep needs experts, and {name} is dense")
    return [Fault("rollout.name", got=engine, stated=True, said=fault) for fault in found]


def record_ranks(
    tensors: Mapping[str, tuple[int, ...]],
    *,
    tp: int,
    play: Callable[[int], AbstractContextManager[Any]],
    parameters: Callable[[Any], dict[str, Tensor]] = lambda model: dict(model.named_parameters()),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[MemoryLayout]:
    """Returns the layout of each of the `tp` ranks of an engine, in the order of ranks.

    Args:
        tensors: shape of every tensor of the checkpoint.
        play: context manager that yields the model of a rank; inside it, layers see that rank.
        parameters: returns the parameters of a model that hold weights.
        dtypes: number formats of tensors that have not that of the model's first parameter.

    Raises:
        WeightSyncFailed: the engine's loader does something no copy plan can repeat, which the message names.
    """
    layouts = []
    for rank in range(tp):
        with play(rank) as model:
            layouts.append(record_loader(model.load_weights, parameters(model), tensors, dtypes))
    return layouts


@contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Builds models inside the `with` in `dtype`, with their parameters on the meta device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _EmptyWithoutMemory():
            yield
    finally:
        torch.set_default_dtype(before)


class _EmptyWithoutMemory(TorchFunctionMode):
    """Puts uninitialised tensors, which are parameters, on the meta device. Tables with content, such as which rank has
    which expert, stay real, because the loader reads them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@dataclass
class SimulatedGroup:
    """Stands in for the engine's `GroupCoordinator` and its process groups while layers are built and loaded. SGLang's
    class derives from vLLM's, so one stand-in serves both."""

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
        """Returns the size of the group, as torch's process groups do."""
        return self.world_size
