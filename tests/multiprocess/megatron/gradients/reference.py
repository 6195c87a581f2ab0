"""What transformers has for a cell: its logits, one sequence at a time, and losses spelled out."""

import pathlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.ops.aggregation import Aggregation
from rlframe.types.batch import Batch, Sequences, TrainBatch
from tests.multiprocess.megatron.forced_routes import force_routes, make_routes
from tests.multiprocess.megatron.gradients.cells import (
    CONSTANT_LENGTH,
    GRPO,
    LENGTHS,
    LOSSES,
    MODELS,
    SHARED,
    TEMPERATURE,
)
from tests.tiny_models import make, on_disk

WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "initializer_range": 0.106}
"""On GPUs: what the one kernel for all experts' products can cut, with activations as large as at a width of 64."""


def logprobs_and_entropies(model: Any, batch: Sequences) -> tuple[Tensor, Tensor]:
    """[T] each, 0 at first tokens."""
    logprobs, entropies = [], []
    chosen = [None] * len(LENGTHS) if batch.routes is None else batch.routes.split(LENGTHS)
    for row, routes in zip(batch.token_ids.split(LENGTHS), chosen, strict=True):
        force_routes(model, routes)
        table = torch.log_softmax(model(row[None]).logits[0].float() / TEMPERATURE, -1)[:-1]
        logprobs += [torch.zeros(1), table.gather(1, row[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(table.exp() * table).sum(1)]
    return torch.cat(logprobs), torch.cat(entropies)


def make_batch(model: Any, *, routes: Tensor | None = None, shared: int = 0) -> TrainBatch:
    """Rollouts whose probability ratios lie inside and outside of the clip range, on both sides.

    The bounds are log 0.8 = -0.22 and log 1.3 = 0.26 nats. No token is near one: in bfloat16 it would be clipped or not
    by chance, and its whole gradient with it.

    Args:
        shared: greatest number of first tokens that the rollouts of a prompt have in common.
    """
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return torch.randn(total, generator=generator) * scale

    lengths = torch.tensor(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.7
    mask[torch.cumsum(lengths, 0) - lengths] = False
    batch = Batch(
        token_ids=torch.randint(0, 67, (total,), generator=generator),
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        group=torch.arange(len(LENGTHS)) // 2,
        rewards=torch.randn(len(LENGTHS), generator=generator),
        versions=torch.zeros(sum(LENGTHS), dtype=torch.int64),
        routes=routes,
    )
    pieces = batch.token_ids.split(LENGTHS)
    for first, second in zip(pieces[::2], pieces[1::2], strict=True):
        count = min(len(first), len(second), shared)
        second[:count] = first[:count]
    with torch.no_grad():
        logprobs, _ = logprobs_and_entropies(model, batch)
    batch.rollout_logprobs = (logprobs + noise(0.1)) * mask
    shifts = torch.tensor([-0.8, -0.03, 0.03, 0.8])
    batch.old_logprobs = logprobs + shifts[torch.randint(0, len(shifts), (total,), generator=generator)]
    batch.reference_logprobs = logprobs + noise(0.5)
    return batch.with_advantages(torch.randn(total, generator=generator) * mask)


def token_losses(loss: str, batch: TrainBatch, logprobs: Tensor, entropies: Tensor) -> Tensor:
    """[T] -logp for sft; for grpo -min(r A, clip(r) A) + beta (e^d - d - 1) - c H, with d = log pi_ref - log pi."""
    if loss == "sft":
        return -logprobs
    assert batch.old_logprobs is not None and batch.reference_logprobs is not None
    ratio = (logprobs - batch.old_logprobs).exp()
    clipped = ratio.clamp(1 - GRPO["clip_low"], 1 + GRPO["clip_high"])
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    gap = batch.reference_logprobs - logprobs
    kl = gap.exp() - gap - 1
    return -surrogate + GRPO["kl_coefficient"] * kl - GRPO["entropy_coefficient"] * entropies


def aggregate(losses: Tensor, batch: TrainBatch, mode: Aggregation) -> Tensor:
    """One number, by the sentence that defines each mode."""
    pieces = [piece[mask] for piece, mask in zip(losses.split(LENGTHS), batch.loss_mask.split(LENGTHS), strict=True)]
    count = len(pieces)
    if mode is Aggregation.TOKEN_SUM:
        return torch.cat(pieces).sum()
    if mode is Aggregation.TOKEN_MEAN:
        return torch.cat(pieces).mean()
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM:
        return sum(piece.sum() for piece in pieces) / count
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        return sum(piece.sum() for piece in pieces) / count / CONSTANT_LENGTH
    if mode is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        return sum(piece.mean() for piece in pieces if len(piece)) / count
    prompts = [torch.cat(pieces[first : first + 2]) for first in range(0, count, 2)]
    return sum(prompt.mean() for prompt in prompts if len(prompt)) / len(prompts)


@dataclass(frozen=True)
class Reference:
    """What transformers has for a loss."""

    loss: float
    scale: float
    """The loss with every token's share made positive: what its rounding errors are measured by."""
    gradients: dict[str, Tensor]
    """Whole tensors by Hugging Face name."""


@dataclass(frozen=True)
class Expected:
    """What transformers has for a model."""

    batch: TrainBatch
    logprobs: Tensor
    """[T]"""
    losses: dict[tuple[str, Aggregation], Reference]


def expectation(name: str, folder: pathlib.Path, dtype: torch.dtype, device: Device) -> Expected:
    """Writes the model to `folder`, its weights rounded to `dtype`, and computes with them in float32."""
    kind, changes = MODELS[name]
    wide = WIDE if device is Device.CUDA and name != "dense" else {}
    model = make(kind, folder, num_hidden_layers=4, **changes | wide).to(dtype)
    model.save_pretrained(folder)
    model = model.float()
    routes = make_routes(model, sum(LENGTHS)) if name == "replayed" else None
    batch, found = make_batch(model, routes=routes, shared=SHARED.get(name, 0)), {}
    logprobs, entropies = logprobs_and_entropies(model, batch)
    for loss, mode in LOSSES:
        value = aggregate(token_losses(loss, batch, logprobs, entropies), batch, mode)
        model.zero_grad()
        value.backward(retain_graph=True)
        gradients: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            gradients |= on_disk(name, parameter.grad.clone())
        losses = token_losses(loss, batch, logprobs.detach(), entropies.detach())
        scale = float(aggregate(losses.abs(), batch, mode))
        found[loss, mode] = Reference(float(value.detach()), scale, gradients)
    return Expected(batch, logprobs.detach(), found)
