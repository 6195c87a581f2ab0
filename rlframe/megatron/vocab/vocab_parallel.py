"""Logprobs and entropy from logits whose vocabulary is split over tensor-parallel ranks.

Source: logp(y) = x_y - log sum_v exp x_v and H = log sum_v exp x_v - sum_v p_v x_v, with x = logits / temperature.
Derivatives: d logp(y) / d x_j = [j = y] - p_j;  d H / d x_j = -p_j (log p_j + H).
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""Float32 elements of a chunk's working copy (1 MiB) on the CPU, the only float32 copy of logits. So many stay in a
core's cache while the operations of a chunk follow each other: 512 tokens of 151,936 logits take 0.43 s forward and
backward on a core of an EPYC of 2025, and 0.80 in chunks of 64 MiB."""
CHUNK_ELEMENTS_OF_GPU = 1 << 26
"""The same on a GPU (256 MiB), where each operation of a chunk is a launch."""
LOWEST = -1e30
"""Stands for minus infinity where two of them are subtracted: 0 times it is 0, and its exp is 0."""


def logprobs_and_entropy(
    logits: Float[Tensor, "T V_local"],
    targets: Int[Tensor, " T"],
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    reuse_logits: bool = False,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Returns [T] float32 nats of each target under log_softmax(logits / temperature), and [T] entropy of that
    distribution.

    No float32 [T, V] tensor is ever created; the gradient has the dtype of logits. An output that the loss does not use
    costs nothing in backward.

    Args:
        logits: this rank's slice of the vocabulary, different on every rank of `group`.
        targets: token ids in the whole vocabulary.
        vocab_size: rows at or above it are padding and take no part.
        group: the tensor-parallel group.
        reuse_logits: whether backward writes the gradient over the logits, which saves their size. torch then refuses
            another backward pass, and that of any other operation that saved them.
    """
    return VocabParallelLogprobs.apply(logits, targets, temperature, vocab_size, group, reuse_logits)


class VocabParallelLogprobs(torch.autograd.Function):
    """See `logprobs_and_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: Any, reuse_logits: bool
    ) -> Any:
        """Keeps the logits, and two numbers of each token."""
        logprobs, entropy, log_normalizer = measured(logits, targets, temperature, vocab_size, group)
        ctx.save_for_backward(logits, targets, log_normalizer, entropy)
        ctx.start, ctx.valid = columns_of_rank(logits.shape[1], vocab_size, group)
        ctx.temperature, ctx.reuse_logits = temperature, reuse_logits
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        """Recomputes the probabilities; needs no communication."""
        logits, targets, log_normalizer, entropy = ctx.saved_tensors
        out = logits.detach() if ctx.reuse_logits else torch.empty_like(logits)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizer)
        implementation(logits).gradient(
            logits, targets, log_normalizer, entropy, grad_logprobs, grad_entropy, out, ctx.temperature, ctx.start,
            ctx.valid,
        )  # fmt: skip
        # A kernel writes unseen by torch, so operations that saved the logits must be told by the version counter.
        torch.autograd.graph.increment_version(out)
        return out, None, None, None, None, None


def columns_of_rank(width: int, vocab_size: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns this rank's first column in the whole vocabulary, and how many of its columns are not padding.

    Args:
        width: columns of each rank.
    """
    start = group.rank() * width
    return start, max(0, min(width, vocab_size - start))


def measured(
    logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> Float[Tensor, "3 T"]:
    """Returns logprob, entropy and log sum exp(logits / temperature) of each token: each rank's own sums, then two
    reductions, the peak and the sums relative to it. The arguments are those of `logprobs_and_entropy`."""
    start, valid = columns_of_rank(logits.shape[1], vocab_size, group)
    local_peak, total, weighted, chosen = implementation(logits).statistics(logits, targets, temperature, start, valid)
    peak = local_peak.clone()
    reduce(peak, dist.ReduceOp.MAX, group)
    drop = local_peak - peak
    here = (targets >= start) & (targets < start + valid)
    sums = torch.stack([total, weighted + drop * total, torch.zeros_like(peak)]) * drop.exp()
    sums[2] = torch.where(here, chosen - peak, 0.0)
    reduce(sums, dist.ReduceOp.SUM, group)
    normalizer, weighted, chosen = sums
    logprobs = chosen - normalizer.log()
    entropy = normalizer.log() - weighted / normalizer
    return torch.stack([logprobs, entropy, normalizer.log() + peak])


def implementation(logits: Tensor) -> Any:
    """Returns the module whose `statistics` and `gradient` run on the device of the logits."""
    if not logits.is_cuda:
        return sys.modules[__name__]
    from rlframe.megatron.vocab import vocab_kernels  # noqa: PLC0415 - Triton is installed with CUDA's torch only

    return vocab_kernels


def statistics(logits: Tensor, targets: Tensor, temperature: float, start: int, valid: int) -> Float[Tensor, "4 T"]:
    """Returns for each token, over this rank's columns of x = logits / temperature: peak (LOWEST if there are none),
    sum exp(x - peak), sum exp(x - peak) (x - peak), and the target's x (0 if another rank has it).

    Args:
        start: this rank's first column in the whole vocabulary.
        valid: columns of this rank that are not padding.
    """
    found = torch.zeros(4, logits.shape[0], dtype=torch.float32, device=logits.device)
    found[0] = LOWEST
    for rows in chunks(logits.shape[0], logits.shape[1]) if valid else ():
        values = scaled(logits[rows, :valid], temperature)
        local, here = local_targets(targets[rows], start, valid)
        chosen = values.gather(1, local[:, None])[:, 0] * here
        peak = values.amax(1)
        values = values - peak[:, None]
        weight = values.exp()
        found[:, rows] = torch.stack([peak, weight.sum(1), values.mul_(weight).sum(1), chosen])
    return found


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in float32: the logits themselves, if that is what they are."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def gradient(
    logits: Tensor,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    out: Tensor,
    temperature: float,
    start: int,
    valid: int,
) -> None:
    """Writes the gradient of the logits into `out`, which may be the logits; zero in columns from `valid` on.

    Args:
        log_normalizer: [T] log sum exp over the whole vocabulary.
        grad_entropy: None if entropy is not used.
    """
    out[:, valid:] = 0
    for rows in chunks(*logits.shape) if valid else ():
        logp = scaled(logits[rows, :valid], temperature) - log_normalizer[rows, None]
        slope = -grad_logprobs[rows, None]
        if grad_entropy is not None:
            slope = slope - grad_entropy[rows, None] * (logp + entropy[rows, None])
        chunk = logp.exp_().mul_(slope)
        local, here = local_targets(targets[rows], start, valid)
        chunk.scatter_add_(1, local[:, None], (grad_logprobs[rows] * here)[:, None])
        out[rows, :valid] = chunk if temperature == 1.0 else chunk.div_(temperature)


def chunks(num_tokens: int, width: int, *, on_gpu: bool = False) -> list[slice]:
    """Returns row ranges of at most CHUNK_ELEMENTS elements, or CHUNK_ELEMENTS_OF_GPU."""
    step = max(1, (CHUNK_ELEMENTS_OF_GPU if on_gpu else CHUNK_ELEMENTS) // max(1, width))
    return [slice(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]


def local_targets(targets: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Returns the column of each target on this rank (0 if another rank has it), and whether this rank has it."""
    here = (targets >= start) & (targets < start + valid)
    return torch.where(here, targets - start, 0), here


def reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Runs an all-reduce in place, unless the group is this rank alone."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=group)
