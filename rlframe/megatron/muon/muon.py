"""Muon on Megatron's distributed optimizer.

Megatron's own Muon (0.16 and 0.19) needs the package emerging-optimizers, which Python 3.11 does not get, and refuses
the distributed optimizer. torch.optim.Muon takes whole matrices. Here main weights and momentum stay the ranges that
the distributed optimizer gives each rank, in its `param_groups` and `state`, so that gradient norms, clipping and
checkpoints are those of AdamW. Only the update of a matrix is put together, by one rank (see `jobs`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlframe.megatron.checkpoint import moments
from rlframe.megatron.config.optimizer import MuonConfig, is_by_muon
from rlframe.megatron.model.model import Model, named_parameters
from rlframe.megatron.muon.exchange import exchange
from rlframe.megatron.muon.jobs import Job, Part, jobs_of, rounds_of, slices_of
from rlframe.megatron.muon.newton_schulz import orthogonalize


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's range of a matrix parameter."""

    part: Part
    weights: Tensor
    """[n] main weights, with their gradient."""
    momentum: Tensor
    """[n] momentum, which is the optimizer's state `momentum_buffer`."""
    settings: dict[str, Any]
    """The optimizer's group of settings."""


class Muon:
    """Muon for the matrices of a model. `step` must be called on all ranks at once, with clipped gradients in the main
    weights, before AdamW's step, which it leaves nothing of a matrix to do."""

    def __init__(self, model: Model, optimizer: MegatronOptimizer, config: MuonConfig):
        self._config = config
        self._dtype = torch.bfloat16 if model.config.params_dtype == torch.bfloat16 else torch.float32
        self._device = next(iter(model.parameters.values())).device
        self._held = {held.part.key: held for held in held_by_rank(model, optimizer)}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, [held.part for held in self._held.values()])
        self._rounds = rounds_of(jobs_of(chain.from_iterable(everywhere), steps=config.newton_schulz_steps))
        self.squares: dict[Tensor, Tensor] = {}
        """By main weights, the square of the norm of what the last step has added to them, if it was measured."""

    @torch.no_grad()
    def step(self, *, measured: bool) -> None:
        """Updates main weights and momentum.

        M = mu M + G, W = W - lr (scale O + decay W), where O is G + mu M orthogonalised. (Liu et al. 2025, equations 1
        and 4; Jordan et al. 2024 for Nesterov's form.)

        Args:
            measured: whether to fill `squares`.
        """
        self.squares.clear()
        for held in self._held.values():
            assert held.weights.grad is not None
            held.momentum.mul_(self._config.momentum).add_(held.weights.grad)
        for jobs in self._rounds:
            self._round(jobs, measured=measured)
        for held in self._held.values():
            held.weights.grad = None

    def _round(self, jobs: list[Job], *, measured: bool) -> None:
        rank = dist.get_rank()
        mine = [job for job in jobs if job.owner == rank]
        parts = exchange(
            [(job.owner, self._direction(part)) for job in jobs for part in job.sources if part.rank == rank],
            [(part.rank, part.size) for job in mine for part in job.sources],
            dtype=self._dtype,
            device=self._device,
        )
        updates = exchange(
            [
                (part.rank, update)
                for job, matrices in zip(mine, self._orthogonalized(mine, parts), strict=True)
                for part, update in zip(job.parts, job.elements_of_parts(matrices), strict=True)
            ],
            [(job.owner, part.size) for job in jobs for part in job.parts if part.rank == rank],
            dtype=self._dtype,
            device=self._device,
        )
        own = [part for job in jobs for part in job.parts if part.rank == rank]
        for part, update in zip(own, updates, strict=True):
            self._apply(self._held[part.key], update, measured=measured)

    def _direction(self, part: Part) -> Tensor:
        """Returns [n] what is orthogonalised: the gradient and Nesterov's look ahead."""
        held = self._held[part.key]
        assert held.weights.grad is not None
        return torch.add(held.weights.grad, held.momentum, alpha=self._config.momentum).to(self._dtype)

    def _orthogonalized(self, jobs: list[Job], parts: list[Tensor]) -> list[list[Tensor]]:
        """Returns the orthogonal matrices of each job. Those of one shape, such as all experts', are computed at once.

        Args:
            parts: the elements of the sources of all jobs, one after the other.
        """
        rest = iter(parts)
        matrices = [job.matrices([next(rest) for _ in job.sources]) for job in jobs]
        alike: dict[torch.Size, list[tuple[int, int]]] = {}
        for place, own in enumerate(matrices):
            for index, matrix in enumerate(own):
                alike.setdefault(matrix.shape, []).append((place, index))
        for places in alike.values():
            stacked = torch.stack([matrices[place][index] for place, index in places])
            found = orthogonalize(stacked, steps=self._config.newton_schulz_steps)
            for (place, index), matrix in zip(places, found, strict=True):
                matrices[place][index] = matrix
        return matrices

    def _apply(self, held: Held, update: Tensor, *, measured: bool) -> None:
        change = update.float()
        if decay := held.settings["weight_decay"]:
            change.add_(held.weights, alpha=decay)
        held.weights.add_(change, alpha=-held.settings["lr"])
        if measured:
            self.squares[held.weights] = (change * held.settings["lr"]).square().sum()


def held_by_rank(model: Model, optimizer: MegatronOptimizer) -> Iterator[Held]:
    """Yields this rank's ranges of the matrix parameters, with a momentum of zeros."""
    names = {parameter: name for name, parameter in named_parameters(model.chunks).items() if is_by_muon(name)}
    slices = slices_of(model.layout, names.values(), alternating=model.architecture.clamped_glu is not None)
    for part in moments.parts(optimizer):
        for parameter, elements, settings in moments.owned(part):
            if parameter in names:
                weights = moments.main_weights(part, parameter)
                own = Part(
                    rank=dist.get_rank(),
                    slice=slices[names[parameter]],
                    start=elements.start,
                    end=elements.stop,
                )
                momentum = torch.zeros_like(weights)
                part.optimizer.state[weights]["momentum_buffer"] = momentum
                yield Held(own, weights, momentum, settings)
