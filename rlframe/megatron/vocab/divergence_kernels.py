"""The divergence of two models and its gradient from logits on a GPU, each in one pass over both (Triton).

`divergence` defines the computation; the two functions here correspond to its functions of the same names. torch's
operations on chunks of rows move some hundred bytes for each pair of logits, these kernels 4 forward and 6 backward.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Number of columns that one program holds in registers at once."""


@triton.jit
def _middle(ours, theirs, log_ours, log_theirs, BETA: tl.constexpr):
    """Returns log M, see `divergence.mixture`. The logarithm's rounding is 6e-8 nats at most, of which a sum takes the
    probability's share."""
    if BETA == 1:
        found = theirs
    else:
        ours, theirs = ours + log_ours, theirs + log_theirs
        found = tl.maximum(ours, theirs) + tl.log(1 + tl.exp(-tl.abs(ours - theirs)))
    return found


@triton.jit(do_not_specialize=["num_tokens"])
def _sums(
    student, teacher, normalizers, out, student_stride, teacher_stride, num_tokens, valid, inverse_temperature, beta,
    log_ours, log_theirs, BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes for one row: this rank's part of D, and of KL(P_S || M)."""
    row = tl.program_id(0).to(tl.int64)
    of_ours, of_theirs = tl.load(normalizers + row), tl.load(normalizers + num_tokens + row)
    student_kl = tl.full((), 0.0, tl.float32)
    teacher_kl = tl.full((), 0.0, tl.float32)
    for first in range(0, valid, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < valid
        ours = tl.load(student + row * student_stride + col, mask=inside, other=0.0).to(tl.float32)
        theirs = tl.load(teacher + row * teacher_stride + col, mask=inside, other=0.0).to(tl.float32)
        ours, theirs = ours * inverse_temperature - of_ours, theirs * inverse_temperature - of_theirs
        if BETA == 0:
            teacher_kl += tl.sum(tl.where(inside, tl.exp(theirs) * (theirs - ours), 0.0), 0)
        else:
            middle = _middle(ours, theirs, log_ours, log_theirs, BETA)
            student_kl += tl.sum(tl.where(inside, tl.exp(ours) * (ours - middle), 0.0), 0)
            if BETA != 1:
                teacher_kl += tl.sum(tl.where(inside, tl.exp(theirs) * (theirs - middle), 0.0), 0)
    if BETA == 0:
        whole = teacher_kl
    elif BETA == 1:
        whole = student_kl
    else:
        whole = beta * teacher_kl + (1 - beta) * student_kl
    tl.store(out + row, whole)
    tl.store(out + num_tokens + row, student_kl)


@triton.jit(do_not_specialize=["num_tokens"])
def _gradient(
    student, teacher, normalizers, student_kl, grad, out, student_stride, teacher_stride, out_stride, num_tokens, valid,
    width, inverse_temperature, beta, log_ours, log_theirs, BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes one row of the gradient; padding gets 0. `out` may be `teacher`: a block is read before it is
    written."""
    row = tl.program_id(0).to(tl.int64)
    of_ours, of_theirs = tl.load(normalizers + row), tl.load(normalizers + num_tokens + row)
    kl, slope = tl.load(student_kl + row), tl.load(grad + row) * inverse_temperature
    for first in range(0, width, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < valid
        ours = tl.load(student + row * student_stride + col, mask=inside, other=0.0).to(tl.float32)
        theirs = tl.load(teacher + row * teacher_stride + col, mask=inside, other=0.0).to(tl.float32)
        ours, theirs = ours * inverse_temperature - of_ours, theirs * inverse_temperature - of_theirs
        if BETA == 0:
            found = tl.exp(ours) - tl.exp(theirs)
        else:
            found = tl.exp(ours) * (ours - _middle(ours, theirs, log_ours, log_theirs, BETA) - kl)
            if BETA != 1:
                found = found * (1 - beta)
        found = tl.where(inside, found * slope, 0.0)
        tl.store(out + row * out_stride + col, found.to(out.dtype.element_ty), mask=col < width)


def sums(student: Tensor, teacher: Tensor, normalizers: Tensor, beta: float, temperature: float, valid: int) -> Tensor:
    """See `divergence.sums`."""
    out = torch.empty(2, len(student), dtype=torch.float32, device=student.device)
    if len(student):
        _sums[(len(student),)](
            student, teacher, normalizers, out, student.stride(0), teacher.stride(0), len(student), valid,
            1 / temperature, float(beta), *_logs(beta), BETA=_kind(beta), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def gradient(
    student: Tensor,
    teacher: Tensor,
    normalizers: Tensor,
    student_kl: Tensor,
    grad: Tensor,
    out: Tensor,
    beta: float,
    temperature: float,
    valid: int,
) -> None:
    """See `divergence.gradient`."""
    if len(student):
        _gradient[(len(student),)](
            student, teacher, normalizers, student_kl, grad.contiguous(), out, student.stride(0), teacher.stride(0),
            out.stride(0), len(student), valid, student.shape[1], 1 / temperature, float(beta), *_logs(beta),
            BETA=_kind(beta), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def _kind(beta: float) -> float:
    """Returns 0 and 1 as they are, for which the formula is another, and 0.5 for all between."""
    return float(beta) if beta in (0, 1) else 0.5


def _logs(beta: float) -> tuple[float, float]:
    """Returns log(1 - beta) and log(beta), 0 where they are not used."""
    return (math.log1p(-beta), math.log(beta)) if 0 < beta < 1 else (0.0, 0.0)
