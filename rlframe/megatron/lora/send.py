"""The adapters as engines receive them: A as it is, and B with the scaling in it, as engines keep it."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlframe.megatron.lora.adapters import Lora
from rlframe.models.adapters import HALVES
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter


class SentAdapters:
    """A and scaling * B of this rank, by PEFT's names. B has memory of its own, A is that of training."""

    def __init__(self, lora: Lora):
        """Allocates the memory and fills it. Must be called on all ranks at once: each knows the tensors of its own
        layers only."""
        self._scaling = lora.config.scaling
        halves = {name: half for name, half in lora.parameters.items() if any(f".{kind}." in name for kind in HALVES)}
        self._b = {name: half for name, half in halves.items() if f".{HALVES[1]}." in name}
        scaled = {name: torch.empty_like(half) for name, half in self._b.items()}
        self.parameters = halves | scaled
        self.layout = MemoryLayout(
            boxes={name: lora.layout.boxes[name] for name in halves},
            tensors=_everywhere({name: lora.layout.tensors[name] for name in halves}),
            parameters={name: Parameter(tuple(half.shape), half.dtype) for name, half in halves.items()},
        )
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Scales the present B, rounded once to its number format. A power of two, such as 2, rounds nothing."""
        if self._b:
            scaled = [self.parameters[name] for name in self._b]
            torch._foreach_copy_(scaled, list(self._b.values()))
            torch._foreach_mul_(scaled, self._scaling)


class MergedOnDemand(Mapping[str, Tensor]):
    """The model's parameters with merged adapters, each merged when it is asked for."""

    def __init__(self, lora: Lora, parameters: Mapping[str, Tensor]):
        self._lora, self._base = lora, parameters
        self._last: tuple[str, Tensor] | None = None
        """The parameter asked for last, of which several tensors are cut."""

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        base = self._base[name]
        if name not in self._lora.adapters:
            return base
        if self._last is None or self._last[0] != name:
            self._last = name, self._lora.adapters[name].merged(base).to(base.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _everywhere(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of all ranks, in one order."""
    found: list[dict[str, tuple[int, ...]]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, tensors)
    every = {name: shape for each in found for name, shape in each.items()}
    return dict(sorted(every.items()))
