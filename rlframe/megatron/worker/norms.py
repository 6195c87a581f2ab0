"""Norms by part of the model: of the gradient, and of what an optimizer step changes in the weights.

Each rank adds up the squares of the elements whose moments it keeps. The distributed optimizer gives every element to
one data-parallel rank; what tensor-parallel ranks and pipeline stages hold twice is counted where Megatron's own norm
counts it. So the sum over the world has every element once, and the squares of the parts add up to that of
`train/grad_norm`.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.megatron.checkpoint import moments
from rlframe.megatron.model.model import Model, named_parameters
from rlframe.megatron.worker.optimizer import Optimizer

PARTS = {
    "mtp": re.compile(r"(^|\.)mtp_head\."),
    "router": re.compile(r"\.router\."),
    "norms": re.compile(r"norm[._](weight|bias)$"),
    "experts": re.compile(r"experts\."),
    "embedding": re.compile(r"embedding"),
    "head": re.compile(r"output_layer\."),
    "attention": re.compile(r"self_attention\."),
    "mlp": re.compile(r"\.mlp\."),
}
"""Parts of a model by the names of their parameters. A parameter belongs to the first that matches. A head that is the
embedding counts there."""


def part_of(name: str) -> str:
    """Returns the part that a parameter belongs to, by its name in `Model.parameters`."""
    return next(part for part, pattern in PARTS.items() if pattern.search(name))


PIECE = 1 << 24
"""Number of elements for which an update is computed at once: 64 MiB for each of its three tensors."""


class Norms:
    """Measures an optimizer step. Must be used on all ranks together: `gradient` before the step, `update` after it."""

    def __init__(self, model: Model, optimizer: Optimizer):
        self._parts = {parameter: part_of(name) for name, parameter in named_parameters(model.chunks).items()}
        self._optimizer = optimizer

    @torch.no_grad()
    def gradient(self) -> dict[str, float]:
        """Returns `train/grad_norm_PART` of the gradient before clipping."""
        found: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        for name, _, parameter, elements, _ in self._counted():
            found[name].append(parameter.main_grad.view(-1)[elements])
        squares = self._over_world([squares_of(found[part]) for part in PARTS])
        there = self._over_world([float(sum(map(Tensor.numel, found[part]))) for part in PARTS])
        return {
            f"train/grad_norm_{part}": square**0.5
            for part, square, count in zip(PARTS, squares, there, strict=True)
            if count
        }

    @torch.no_grad()
    def update(self, *, num_steps: int) -> dict[str, float]:
        """Returns `train/update_ratio` and `train/update_ratio_PART`: the norm of what the step has changed in the main
        weights over the norm of these.

        Adam's moments say what it was, so that nobody keeps the weights before the step: with rate l, decay d and the
        direction u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) it went from w' to w = w' - l (d w' + u), and
        w - w' = -l (d w + u) / (1 - l d). (Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2.) Muon measures
        its own steps.

        Args:
            num_steps: number t of steps that the optimizer has taken, this one included.
        """
        changes: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        weights: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        by_muon = self._optimizer.muon.squares if self._optimizer.muon else {}
        for name, part, parameter, _, group in self._counted():
            own = moments.tensors_of(part, parameter)
            if own["param"] in by_muon:
                changes[name].append(by_muon[own["param"]])
                weights[name].append(own["param"].square().sum())
                continue
            for tensors in pieces(own):
                # On the parameter's device, wherever the optimizer keeps its state: nothing waits here.
                change = change_of(tensors, group, num_steps=num_steps).square().sum()
                changes[name].append(change.to(parameter.device))
                weights[name].append(tensors["param"].float().square().sum().to(parameter.device))
        total = self._over_world([sum_of(each[part]) for each in (changes, weights) for part in PARTS])
        changed, held = (dict(zip(PARTS, half, strict=True)) for half in (total[: len(PARTS)], total[len(PARTS) :]))
        ratios = {f"train/update_ratio_{part}": (changed[part] / held[part]) ** 0.5 for part in PARTS if held[part]}
        return {"train/update_ratio": (sum(changed.values()) / sum(held.values())) ** 0.5, **ratios}

    def _counted(self) -> Iterator[tuple[str, Any, Any, slice, Any]]:
        """Yields part of the model, part of the optimizer, parameter, this rank's elements of it and its settings,
        where this rank's elements count."""
        for part in moments.parts(self._optimizer):
            for parameter, elements, settings in moments.owned(part):
                if moments.counts_in_norm(part, parameter):
                    yield self._parts[parameter], part, parameter, elements, settings

    def _over_world(self, own: list[float]) -> list[float]:
        device = next(iter(self._parts)).device
        values = torch.tensor(own, dtype=torch.float64, device=device)
        dist.all_reduce(values)
        return values.tolist()


def squares_of(tensors: list[Tensor]) -> float:
    """Returns the sum of the squares of all elements."""
    return sum_of([norm.square() for norm in torch._foreach_norm(tensors, 2, dtype=torch.float32)]) if tensors else 0.0


def sum_of(numbers: list[Tensor]) -> float:
    """Returns the sum of numbers on one device."""
    return float(torch.stack(numbers).double().sum()) if numbers else 0.0


def pieces(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yields tensors of one size in pieces of at most PIECE elements. What is computed from a piece is small beside the
    tensors."""
    flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
    for start in range(0, tensors["param"].numel(), PIECE):
        yield {name: tensor[start : start + PIECE] for name, tensor in flat.items()}


def change_of(tensors: dict[str, Tensor], group: Any, *, num_steps: int) -> Tensor:
    """Returns what an AdamW step has added to the main weights; see `Norms.update`."""
    beta1, beta2 = group["betas"]
    rate, decay = group["lr"], group["weight_decay"]
    weights = tensors["param"].float()
    scale = (tensors["exp_avg_sq"].to(weights) / (1 - beta2**num_steps)).sqrt_().add_(group["eps"])
    direction = tensors["exp_avg"].to(weights) / (1 - beta1**num_steps) / scale
    return direction.add_(weights, alpha=decay).mul_(-rate / (1 - rate * decay))
