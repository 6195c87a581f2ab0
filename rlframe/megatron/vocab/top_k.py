"""The divergence from a teacher of which only its k most likely tokens are known, on a vocabulary split over ranks.

Both distributions are looked at as if there were k + 1 outcomes: each of the teacher's k most likely tokens, and the
rest, which is any other token. The divergence is that of `vocab.divergence` between the two coarse ones: the
whole divergence, less what the models differ in within the rest. So it is never below 0 nor above the whole, is 0 only
where the student gives each of the k tokens the teacher's probability, and is the whole at k = V.

Source: Agarwal et al. 2024, arXiv 2306.13649, equation 1, on the outcomes of Tail-Aware Top-k On-Policy Distillation,
arXiv 2608.14728, which calls the rest the tail token. Others differ, and `Rest` has what they do: with both models
renormalised over the k tokens (ms-swift) a student that moves its mass elsewhere looks perfect, which is what that
paper is about; a sum over the k tokens without the rest (verl, verl/trainer/distillation/fsdp/losses.py) is no
divergence, and can fall below 0. verl's floor under the logprobs (log_prob_min_clamp) is not offered: it changes which
distributions are compared.

Derivatives, with x = logits / temperature, p the student's probabilities and rest the tokens not among the k:
d log p(i) / d x_j = [j = i] - p_j;  d log p(rest) / d x_j = [j in rest] p_j / p(rest) - p_j.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.megatron.vocab import vocab_parallel
from rlframe.megatron.vocab.divergence import sums_of
from rlframe.megatron.vocab.vocab_parallel import LOWEST
from rlframe.types.results import Rest


def divergence(
    student: Float[Tensor, "T V_local"],
    ids: Int[Tensor, "T k"],
    teacher: Float[Tensor, "T k+1"],
    *,
    beta: float,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    rest: Rest = Rest.ONE_OUTCOME,
) -> Float[Tensor, " T"]:
    """Returns [T] float32 nats: the divergence of the student from the teacher at each token, with a gradient for the
    student.

    Args:
        student: this rank's slice of the vocabulary, different on every rank of `group`.
        ids: the teacher's k most likely tokens, in the whole vocabulary.
        teacher: its logprobs of them, and in the last column of the rest, at the same temperature.
        beta: in [0, 1], as for the whole divergence.
        temperature: divisor of the student's logits.
        vocab_size: rows at or above it are padding and take no part.
        group: the tensor-parallel group.
        rest: treatment of all other tokens.
    """
    ours = logprobs_and_rest(student, ids, temperature=temperature, vocab_size=vocab_size, group=group)
    if rest is not Rest.ONE_OUTCOME:
        ours, teacher = ours[:, :-1], teacher[:, :-1]
    if rest is Rest.RENORMALIZED:
        ours, teacher = ours.log_softmax(1), teacher.log_softmax(1)
    return sums_of(ours, teacher, beta)[0]


def largest(
    logits: Float[Tensor, "T V_local"], *, k: int, vocab_size: int, group: dist.ProcessGroup
) -> Int[Tensor, "T k"]:
    """Returns [T, k] int64 ids of the k most likely tokens in the whole vocabulary, the most likely first. The same on
    every rank."""
    assert k <= vocab_size, "refused by config.check"
    start = group.rank() * logits.shape[1]
    valid = max(0, min(logits.shape[1], vocab_size - start))
    values = logits.new_full((len(logits), k), LOWEST)
    ids = torch.zeros(values.shape, dtype=torch.int64, device=logits.device)
    if count := min(k, valid):
        values[:, :count], ids[:, :count] = logits[:, :valid].topk(count, dim=1)
        ids += start
    if group.size() == 1:
        return ids
    candidates = torch.cat(gathered(values, group), dim=1).topk(k, dim=1).indices
    return torch.cat(gathered(ids, group), dim=1).gather(1, candidates)


def gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensor of each rank, by rank."""
    everyones = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyones, own, group=group)
    return everyones


def logprobs_and_rest(
    logits: Float[Tensor, "T V_local"],
    ids: Int[Tensor, "T k"],
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Float[Tensor, "T k+1"]:
    """Returns [T, k + 1] float32 nats of the tokens `ids`, and in the last column of all others together, LOWEST if
    there are none.

    No float32 [T, V] tensor is ever created; the gradient has the dtype of logits. The mass of the other tokens is
    summed directly: 1 minus the sum of the k would lose all digits if the k have nearly all mass.
    """
    return VocabParallelTop.apply(logits, ids.long(), temperature, vocab_size, group)


class VocabParallelTop(torch.autograd.Function):
    """See `logprobs_and_rest`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float, vocab_size: int, group: Any) -> Any:
        """Computes it with two reductions: the chosen logits with the peak of the others, and the others' sum."""
        start = group.rank() * logits.shape[1]
        valid = max(0, min(logits.shape[1], vocab_size - start))
        # Of the k tokens LOWEST if another rank has them.
        peaks = torch.full((len(ids), ids.shape[1] + 1), LOWEST, dtype=torch.float32, device=logits.device)
        total = torch.zeros(len(ids), dtype=torch.float32, device=logits.device)
        for rows in vocab_parallel.chunks(*logits.shape, on_gpu=logits.is_cuda) if valid else ():
            scaled, columns = scratch(logits[rows], ids[rows], temperature, start, valid)
            peaks[rows, :-1] = scaled.gather(1, columns)
            others = scaled.scatter_(1, columns, LOWEST)
            peaks[rows, -1] = others.amax(1)
            total[rows] = (others - peaks[rows, -1:]).exp().sum(1)
        local_peak = peaks[:, -1].clone()
        vocab_parallel.reduce(peaks, dist.ReduceOp.MAX, group)
        total = total * (local_peak - peaks[:, -1]).exp()
        vocab_parallel.reduce(total, dist.ReduceOp.SUM, group)
        peaks[:, -1] += total.log()
        normalizer = peaks.logsumexp(1)
        ctx.save_for_backward(logits, ids, peaks[:, -1], normalizer)
        ctx.temperature, ctx.start, ctx.valid = temperature, start, valid
        return peaks - normalizer[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Recomputes the probabilities; needs no communication."""
        logits, ids, rest, normalizer = ctx.saved_tensors
        out = torch.zeros_like(logits)
        every = grad.sum(1, keepdim=True)
        for rows in vocab_parallel.chunks(*logits.shape, on_gpu=logits.is_cuda) if ctx.valid else ():
            scaled, columns = scratch(logits[rows], ids[rows], ctx.temperature, ctx.start, ctx.valid)
            chosen = grad[rows, :-1] - every[rows] * (scaled.gather(1, columns) - normalizer[rows, None]).exp()
            scaled.scatter_(1, columns, LOWEST)
            slope = grad[rows, -1:] * (scaled - rest[rows, None]).exp()
            slope -= every[rows] * scaled.sub_(normalizer[rows, None]).exp_()
            slope.scatter_(1, columns, chosen)
            out[rows, : ctx.valid] = (slope[:, : ctx.valid] / ctx.temperature).to(out.dtype)
        return out, None, None, None, None


def scratch(logits: Tensor, ids: Tensor, temperature: float, start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Returns [rows, valid + 1] float32 logits / temperature of this rank's columns, and [rows, k] the column of each
    id.

    The last column belongs to no token: it stands for ids on other ranks, and is LOWEST.
    """
    scaled = torch.full((len(logits), valid + 1), LOWEST, dtype=torch.float32, device=logits.device)
    scaled[:, :valid].copy_(logits[:, :valid]).div_(temperature)
    here = (ids >= start) & (ids < start + valid)
    return scaled, torch.where(here, ids - start, valid)
