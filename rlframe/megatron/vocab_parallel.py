"""Logprobs and entropy from logits whose vocabulary is split over tensor-parallel ranks.

Source: logp(y) = x_y - log sum_v exp x_v and H = log sum_v exp x_v - sum_v p_v x_v, with x = logits / temperature.
Derivatives: d logp(y) / d x_j = [j = y] - p_j;  d H / d x_j = -p_j (log p_j + H).
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Float32 elements of a chunk's working copy (64 MiB): the only float32 copy of logits that exists."""


def logprobs_and_entropy(
    logits: Float[Tensor, "T V_local"],
    targets: Int[Tensor, " T"],
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """[T] float32 nats of each target under log_softmax(logits / temperature), and [T] entropy of that distribution.

    Works through the tokens in chunks, so no float32 [T, V] tensor is ever made; the gradient has the dtype of logits.

    Args:
        logits: this rank's slice of the vocabulary, equal on no two ranks of `group`.
        targets: token ids in the whole vocabulary.
        vocab_size: rows at or above it are padding and take no part.
        group: the tensor-parallel group.
    """
    return VocabParallelLogprobs.apply(logits, targets, temperature, vocab_size, group)


class VocabParallelLogprobs(torch.autograd.Function):
    """See `logprobs_and_entropy`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: Any) -> Any:
        """One pass: max, then one reduction for sum exp, sum exp * x and the target's x."""
        start = group.rank() * logits.shape[1]
        valid = max(0, min(logits.shape[1], vocab_size - start))
        num_tokens = logits.shape[0]
        logprobs, entropy, log_normalizer = (
            torch.zeros(num_tokens, dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        for rows in chunks(num_tokens, logits.shape[1]):
            scaled = logits[rows, :valid].float() / temperature
            peak = scaled.amax(1) if valid else scaled.new_full((scaled.shape[0],), -torch.inf)
            reduce(peak, dist.ReduceOp.MAX, group)
            scaled = scaled - peak[:, None]
            weight = scaled.exp()
            local, here = local_targets(targets[rows], start, valid)
            chosen = scaled.gather(1, local[:, None])[:, 0] * here if valid else torch.zeros_like(peak)
            sums = torch.stack([weight.sum(1), (weight * scaled).sum(1), chosen])
            reduce(sums, dist.ReduceOp.SUM, group)
            normalizer, weighted, chosen = sums
            logprobs[rows] = chosen - normalizer.log()
            entropy[rows] = normalizer.log() - weighted / normalizer
            log_normalizer[rows] = normalizer.log() + peak
        ctx.save_for_backward(logits, targets, log_normalizer, entropy)
        ctx.temperature, ctx.start, ctx.valid = temperature, start, valid
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> Any:
        """Recomputes each chunk's probabilities; needs no communication."""
        logits, targets, log_normalizer, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for rows in chunks(*logits.shape):
            if not ctx.valid:
                break
            logp = logits[rows, : ctx.valid].float() / ctx.temperature - log_normalizer[rows, None]
            slope = grad_entropy[rows, None] * (logp + entropy[rows, None]) + grad_logprobs[rows, None]
            chunk = -logp.exp() * slope
            local, here = local_targets(targets[rows], ctx.start, ctx.valid)
            chunk.scatter_add_(1, local[:, None], (grad_logprobs[rows] * here)[:, None])
            grad[rows, : ctx.valid] = (chunk / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def chunks(num_tokens: int, width: int) -> list[slice]:
    """Row ranges of at most CHUNK_ELEMENTS elements."""
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


def local_targets(targets: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (0 where it lives elsewhere), and whether it lives here."""
    here = (targets >= start) & (targets < start + valid)
    return torch.where(here, targets - start, 0), here


def reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """All-reduce in place, unless the group is this rank alone."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
