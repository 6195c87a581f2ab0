"""Tensors of one kind, over which the kernels go by a table of their addresses."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

STATES = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 16
"""Bytes that a GPU moves for a thread at once."""


class Kind(NamedTuple):
    """Describes tensors that one kernel updates."""

    group: int
    """Index of the optimizer's group of settings."""
    gradients: torch.dtype
    weights: torch.dtype
    """Number format of weights that are written beside the main weights. float32 if there are none."""
    moments: torch.dtype
    remainders: bool
    """Whether main weights are kept as the bits that the weights lack."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's elements of a parameter."""

    gradient: Tensor
    weight: Tensor
    """The main weight itself if there is no other."""
    state: dict[str, Tensor]
    main: Tensor
    counts: bool
    """Whether the gradient is part of the norm: it is no copy of another rank's."""

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses of its tensors."""
        first, second = (self.state[name].data_ptr() for name in STATES)
        return self.gradient.data_ptr(), self.weight.data_ptr(), self.main.data_ptr(), first, second


class Table:
    """Tensors of a kind."""

    def __init__(self, kind: Kind, shards: list[Shard]):
        from rlframe.megatron.adam import kernels  # noqa: PLC0415 - needs Triton

        self.kind, self.shards, self.device, self._kernels = kind, shards, shards[0].gradient.device, kernels
        self.sizes = sizes = np.array([shard.gradient.numel() for shard in shards])
        parts = -(-sizes // kernels.CHUNK)
        row = np.repeat(np.arange(len(sizes)), parts)
        part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        self.chunks = torch.from_numpy(np.stack([row, part], axis=1).astype(np.int32)).to(self.device)
        self._addresses: list[tuple[int, ...]] = []
        self._table = torch.empty(0)
        self._options: dict[str, Any] = {}

    def look(self) -> None:
        """Writes the addresses of the tensors anew if memory has moved. Must come before `squares` and `update`."""
        addresses, kernels = [shard.addresses() for shard in self.shards], self._kernels
        if addresses == self._addresses:
            return
        self._addresses = addresses
        counts = [shard.counts for shard in self.shards]
        table = np.column_stack([np.array(addresses), self.sizes, counts]).astype(np.int64)
        self._table = torch.from_numpy(table).to(self.device)
        self._options = {
            "GRADIENTS": kernels.FORMATS[self.kind.gradients],
            "ALIGNED": not (table[:, :5] % ALIGNMENT).any(),
            "COLUMNS": kernels.COLUMNS,
            "BLOCK": kernels.BLOCK,
            "BLOCKS": kernels.BLOCKS,
        }

    def update(self, group: dict[str, Any], scale: float) -> None:
        """Takes a step.

        Args:
            group: the optimizer's settings, whose `step` counts this one.
            scale: by which gradients are clipped.
        """
        kernels, (beta1, beta2) = self._kernels, group["betas"]
        corrections = [1 - beta ** group["step"] for beta in (beta1, beta2)]
        numbers = map(float, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], *corrections, scale))
        kernels.update[(len(self.chunks),)](
            self._table, self.chunks, *numbers,
            WEIGHTS=kernels.FORMATS[self.kind.weights], MOMENTS=kernels.FORMATS[self.kind.moments],
            REMAINDERS=self.kind.remainders, **self._options,
        )  # fmt: skip

    def squares(self) -> Tensor:
        """Returns the sum of the squares of the gradients that count, in float64."""
        sums = torch.empty(len(self.chunks), device=self.device)
        self._kernels.squares[(len(self.chunks),)](self._table, self.chunks, sums, **self._options)
        return sums.sum(dtype=torch.float64)
