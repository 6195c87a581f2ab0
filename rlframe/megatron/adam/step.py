"""AdamW's step and the gradient norm of one rank, by one kernel each for all tensors of a kind.

Megatron (0.16 to 0.19) and Transformer Engine (2.20) look at each parameter some ten times a step on the host, while
the GPU waits. Here tensors are looked at once, and afterwards only their addresses are compared. State stays where
Transformer Engine keeps it, which also makes it, in the first step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.megatron.checkpoint import moments
from rlframe.utils.errors import RlframeError

STATES = ("exp_avg", "exp_avg_sq")
ALIGNMENT = 16
"""Bytes that a GPU moves for a thread at once."""


class Kind(NamedTuple):
    """What tensors have in common that one kernel updates."""

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


class AdamStep:
    """Steps of Megatron's distributed optimizers, from the second one on."""

    def __init__(self, parts: list[Any], *, device: torch.device, clip_grad: float):
        """
        Args:
            parts: all of a chain, also those that have no parameters on this rank.
            device: of the parameters.
            clip_grad: bound of the gradient norm, 0 for none.
        """
        self.parts, self.device, self.clip_grad = parts, device, clip_grad
        self.is_ready = False
        """Whether there are moments. All ranks become ready in the same step."""
        self._scale = 1.0
        self._states: list[Any] = []
        self._tables: list[list[Table]] = []

    def begin(self) -> None:
        """Takes the place of Transformer Engine's step. Must be called when there are moments."""
        if self.is_ready:
            return
        self.is_ready = True
        for index, part in enumerate(self.parts):
            if part.is_stub_optimizer:
                continue
            part.optimizer.step = lambda index=index: self._update(index)
            # The kernel writes these, too.
            part._copy_main_params_to_model_params = MethodType(lambda _: None, part)

    def gradient_norm(self) -> float:
        """Returns the gradient norm of all ranks before clipping, and notes by how much the next step clips."""
        self._look()
        totals: dict[int, tuple[Any, list[Tensor]]] = {}
        for part, tables in zip(self.parts, self._tables, strict=True):
            group = part.get_grad_stats_parallel_group()
            totals.setdefault(id(group), (group, []))[1].extend(table.squares() for table in tables)
        square = 0.0
        for group, own in totals.values():
            total = torch.stack([torch.zeros((), dtype=torch.float64, device=self.device), *own]).sum()
            dist.all_reduce(total, group=group)
            square += float(total)
        norm = math.sqrt(square)
        # As torch.nn.utils.clip_grad_norm_ and Megatron's clip_grad_by_total_norm_fp32.
        self._scale = min(1.0, self.clip_grad / (norm + 1e-6)) if self.clip_grad and math.isfinite(norm) else 1.0
        return norm

    def _update(self, index: int) -> None:
        groups = self.parts[index].optimizer.param_groups
        for group in groups:
            group["step"] = group.get("step", 0) + 1
        for table in self._tables[index]:
            table.update(groups[table.kind.group], self._scale)

    def _look(self) -> None:
        """Makes tables of the parts' tensors, unless the tensors are those of the step before, wherever these are."""
        states = [None if part.is_stub_optimizer else part.optimizer.state for part in self.parts]
        if len(states) != len(self._states) or any(a is not b for a, b in zip(states, self._states, strict=True)):
            self._states = states
            self._tables = [[] if part.is_stub_optimizer else tables_of(part) for part in self.parts]
        for tables in self._tables:
            for table in tables:
                table.look()


def tables_of(part: Any) -> list[Table]:
    """Returns the tables of one distributed optimizer."""
    kinds: dict[Kind, list[Shard]] = {}
    for kind, shard in shards_of(part):
        kinds.setdefault(kind, []).append(shard)
    return [Table(kind, shards) for kind, shards in kinds.items()]


def shards_of(part: Any) -> Iterator[tuple[Kind, Shard]]:
    """Yields what this rank updates of each parameter.

    Raises:
        RlframeError: the kernel does not know how Transformer Engine keeps a parameter.
    """
    groups = {id(group): index for index, group in enumerate(part.optimizer.param_groups)}
    for parameter, elements, group in moments.owned(part):
        if elements.start == elements.stop:
            continue
        held = moments.main_weights(part, parameter)
        state = part.optimizer.state[held]
        weight, main = parameter.detach().view(-1)[elements], held.detach()
        remainders = main.dtype == torch.bfloat16
        if remainders:
            main = state["master_param"]
        known = main.dtype == (torch.int16 if remainders else torch.float32)
        formats = {state[name].dtype for name in STATES}
        if not known or len(formats) > 1:
            raise RlframeError(
                f"train.kernels.optimizer_fusion must be false: main weights are {main.dtype}, moments {formats}"
            )
        kind = Kind(groups[id(group)], parameter.main_grad.dtype, weight.dtype, formats.pop(), remainders)
        counts = moments.counts_in_norm(part, parameter)
        yield kind, Shard(parameter.main_grad.view(-1)[elements], weight, state, main, counts)
