"""Generalised Jensen-Shannon divergence of two models whose vocabulary is split over tensor-parallel ranks.

Source: Agarwal et al. 2024, arXiv 2306.13649, equation 1, with P_S the student's and P_T the teacher's distribution,
both softmax(logits / temperature), and M = (1 - beta) P_S + beta P_T:
  D = beta KL(P_T || M) + (1 - beta) KL(P_S || M)
At beta 0 and 1 M is one of the two and D is 0; there the limits of D / beta and D / (1 - beta) are taken instead, as
the paper does: KL(P_T || P_S) at beta 0, KL(P_S || P_T) at beta 1.

Derivative with respect to the student's x_j = logits_j / temperature, with K = KL(P_S || M):
  beta KL(P_T || M) gives d / d P_S(v) = -beta (1 - beta) P_T(v) / M(v), and (1 - beta) KL(P_S || M) gives
  (1 - beta) (log(P_S(v) / M(v)) + 1 - (1 - beta) P_S(v) / M(v)). All but the logarithm cancel, as the rest adds up to
  M(v) / M(v) = 1, and through the softmax d D / d x_j = (1 - beta) P_S(j) (log(P_S(j) / M(j)) - K).
  beta 1: P_S(j) (log(P_S(j) / P_T(j)) - D).   beta 0: P_S(j) - P_T(j).

Plain torch operations on chunks of rows; on a GPU the kernels of `vocab_kernels` and `divergence_kernels`.
"""

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlframe.megatron.vocab import vocab_parallel


def divergence(
    student: Float[Tensor, "T V_local"],
    teacher: Float[Tensor, "T V_local"],
    *,
    beta: float,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup,
    reuse_teacher: bool = False,
) -> Float[Tensor, " T"]:
    """Returns [T] float32 nats: the divergence of the student from the teacher at each token, with a gradient for the
    student.

    No float32 [T, V] tensor is ever created; the gradient has the dtype of the student's logits.

    Args:
        student: this rank's slice of the vocabulary, different on every rank of `group`.
        teacher: the same slice of the teacher's logits; it gets no gradient.
        beta: in [0, 1], see above.
        temperature: divisor of both models' logits.
        vocab_size: rows at or above it are padding and take no part.
        group: the tensor-parallel group.
        reuse_teacher: whether backward writes the gradient over the teacher's logits, which saves their size if both
            have one dtype.
    """
    assert student.shape == teacher.shape, "config.check refuses a teacher with another vocabulary"
    return VocabParallelDivergence.apply(student, teacher, beta, temperature, vocab_size, group, reuse_teacher)


class VocabParallelDivergence(torch.autograd.Function):
    """See `divergence`."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        beta: float,
        temperature: float,
        vocab_size: int,
        group: Any,
        reuse_teacher: bool,
    ) -> Any:
        """Computes the divergence. The normalizers take two reductions; the sums over the vocabulary, one more."""
        start = group.rank() * student.shape[1]
        valid = max(0, min(student.shape[1], vocab_size - start))
        normalizers = log_normalizers([student, teacher], temperature, start=start, valid=valid, group=group)
        found = implementation(student).sums(student, teacher, normalizers, beta, temperature, valid)
        vocab_parallel.reduce(found, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(student, teacher, normalizers, found[1])
        ctx.beta, ctx.temperature, ctx.valid, ctx.reuse_teacher = beta, temperature, valid, reuse_teacher
        return found[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Recomputes the probabilities; needs no communication."""
        student, teacher, normalizers, student_kl = ctx.saved_tensors
        reuse = ctx.reuse_teacher and teacher.dtype == student.dtype
        out = teacher.detach() if reuse else torch.empty_like(student)
        implementation(student).gradient(
            student, teacher, normalizers, student_kl, grad, out, ctx.beta, ctx.temperature, ctx.valid
        )
        # A kernel writes unseen by torch, so operations that saved the logits must be told by the version counter.
        torch.autograd.graph.increment_version(out)
        return out, None, None, None, None, None, None


def implementation(logits: Tensor) -> Any:
    """Returns the module whose `sums` and `gradient` run on the device of the logits."""
    if not logits.is_cuda:
        return sys.modules[__name__]
    from rlframe.megatron.vocab import divergence_kernels  # noqa: PLC0415 - Triton is installed with CUDA's torch only

    return divergence_kernels


def sums(
    student: Tensor, teacher: Tensor, normalizers: Float[Tensor, "2 T"], beta: float, temperature: float, valid: int
) -> Float[Tensor, "2 T"]:
    """Returns for each token this rank's part of D, and of KL(P_S || M), which the gradient needs.

    Args:
        normalizers: [2, T] log sum exp over the whole vocabulary, of student and teacher.
        valid: columns of this rank that are not padding.
    """
    found = torch.zeros(2, student.shape[0], dtype=torch.float32, device=student.device)
    for rows in vocab_parallel.chunks(student.shape[0], valid) if valid else ():
        ours, theirs = logprobs(student, teacher, normalizers, rows, valid, temperature)
        found[:, rows] = sums_of(ours, theirs, beta)
    return found


def gradient(
    student: Tensor,
    teacher: Tensor,
    normalizers: Float[Tensor, "2 T"],
    student_kl: Float[Tensor, " T"],
    grad: Float[Tensor, " T"],
    out: Tensor,
    beta: float,
    temperature: float,
    valid: int,
) -> None:
    """Writes the gradient of the student's logits into `out`, which may be the teacher's; zero in columns from `valid`
    on.

    Args:
        student_kl: [T] KL(P_S || M) over the whole vocabulary.
        grad: [T] gradient of each token's divergence.
    """
    out[:, valid:] = 0
    for rows in vocab_parallel.chunks(student.shape[0], valid) if valid else ():
        ours, theirs = logprobs(student, teacher, normalizers, rows, valid, temperature)
        slope = slopes(ours, theirs, student_kl[rows, None], beta)
        out[rows, :valid] = (slope * (grad[rows, None] / temperature)).to(out.dtype)


def log_normalizers(
    logits: list[Tensor], temperature: float, *, start: int, valid: int, group: dist.ProcessGroup
) -> Float[Tensor, "N T"]:
    """Returns [N, T] log sum exp(x / temperature) over the whole vocabulary, for each of N models."""
    nobody = torch.zeros(logits[0].shape[0], dtype=torch.int64, device=logits[0].device)
    found = [
        vocab_parallel.implementation(each).statistics(each, nobody, temperature, start, valid)[:2] for each in logits
    ]
    local_peak, total = torch.stack([peak for peak, _ in found]), torch.stack([total for _, total in found])
    peak = local_peak.clone()
    vocab_parallel.reduce(peak, dist.ReduceOp.MAX, group)
    total = total * (local_peak - peak).exp()
    vocab_parallel.reduce(total, dist.ReduceOp.SUM, group)
    return total.log() + peak


def renyi_entropies(
    logits: Float[Tensor, "T V_local"], *, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> Float[Tensor, " T"]:
    """Returns [T] float32 nats, without a gradient: -log sum_v p(v)^2, the entropy of order 2, p softmax(logits /
    temperature).

    With x = logits / temperature it is 2 log sum_v exp x_v - log sum_v exp 2 x_v.
    """
    start = group.rank() * logits.shape[1]
    place = {"start": start, "valid": max(0, min(logits.shape[1], vocab_size - start)), "group": group}
    with torch.no_grad():
        once, twice = (log_normalizers([logits], each, **place)[0] for each in (temperature, temperature / 2))
    return 2 * once - twice


def logprobs(
    student: Tensor, teacher: Tensor, normalizers: Float[Tensor, "2 T"], rows: slice, valid: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns [rows, valid] float32 log P_S and log P_T."""
    return (
        student[rows, :valid].float() / temperature - normalizers[0, rows, None],
        teacher[rows, :valid].float() / temperature - normalizers[1, rows, None],
    )


def sums_of(ours: Tensor, theirs: Tensor, beta: float) -> Float[Tensor, "2 rows"]:
    """Returns this rank's part of D, and of KL(P_S || M), which the gradient needs. M is P_T at beta 1, P_S at beta
    0."""
    if beta == 0:
        forward = (theirs.exp() * (theirs - ours)).sum(1)
        return torch.stack([forward, torch.zeros_like(forward)])
    middle = mixture(ours, theirs, beta)
    student_kl = (ours.exp() * (ours - middle)).sum(1)
    if beta == 1:
        return torch.stack([student_kl, student_kl])
    teacher_kl = (theirs.exp() * (theirs - middle)).sum(1)
    return torch.stack([beta * teacher_kl + (1 - beta) * student_kl, student_kl])


def slopes(ours: Tensor, theirs: Tensor, student_kl: Tensor, beta: float) -> Tensor:
    """Returns d D / d x of this rank's columns."""
    if beta == 0:
        return ours.exp() - theirs.exp()
    slope = ours.exp() * (ours - mixture(ours, theirs, beta) - student_kl)
    return slope if beta == 1 else (1 - beta) * slope


def mixture(ours: Tensor, theirs: Tensor, beta: float) -> Tensor:
    """Returns log M, or log P_T at beta 1."""
    if beta == 1:
        return theirs
    return torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
