"""AdamW's step and the gradient norm of one rank, by one kernel each for all tensors of a kind.

Megatron (0.16 to 0.19) and Transformer Engine (2.20) look at each parameter some ten times a step on the host, while
the GPU waits. Here tensors are looked at once, and afterwards only their addresses are compared. State stays where
Transformer Engine keeps it, which also makes it, in the first step of a run.
"""

import math
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.megatron.adam.table import ALIGNMENT, STATES, Kind, Shard, Table
from rlframe.megatron.checkpoint import moments
from rlframe.utils.errors import RlframeError


class AdamStep:
    """Steps of Megatron's distributed optimizers, from a run's second one on."""

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

    def warm_up(self, moment_format: torch.dtype) -> None:
        """Compiles the kernels, by a step of a few zeros.

        Args:
            moment_format: number format of the moments, which need not be there yet.
        """
        for part in self.parts:
            for kind in () if part.is_stub_optimizer else formats_of(part, moment_format):
                table = Table(kind, [zeros(kind, self.device)])
                table.look()
                table.squares()
                table.update({**part.optimizer.param_groups[kind.group], "step": 1}, 1.0)

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


def formats_of(part: Any, moment_format: torch.dtype) -> set[Kind]:
    """Returns a kind for each combination of number formats of a part's tensors, all of the first group."""
    return {
        Kind(
            group=0,
            gradients=parameter.main_grad.dtype,
            weights=parameter.dtype,
            moments=moment_format,
            remainders=moments.main_weights(part, parameter).dtype == torch.bfloat16,
        )
        for parameter, elements, _ in moments.owned(part)
        if elements.start != elements.stop
    }


def zeros(kind: Kind, device: torch.device) -> Shard:
    """Returns tensors of a kind, of ALIGNMENT elements."""

    def made(dtype: torch.dtype) -> Tensor:
        return torch.zeros(ALIGNMENT, dtype=dtype, device=device)

    main = made(torch.int16 if kind.remainders else torch.float32)
    weight = main if kind.weights == torch.float32 else made(kind.weights)
    state = {name: made(kind.moments) for name in STATES}
    return Shard(made(kind.gradients), weight, state, main, counts=True)


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
