"""Norms and gates between the products of a layer, for steps of more rows than one kernel takes (Triton)."""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from rlframe.rollout.vllm.attention.kernels import can_depend

LANES = 1024
"""Numbers of a program that gates."""


@triton.jit
def _add_norm(x, residual, norm, added, out, columns, epsilon, LANES: tl.constexpr, DEPENDENT: tl.constexpr):
    """Computes a row: the sum with the residual, and its norm.

    Args:
        DEPENDENT: whether the kernel is launched before the one ahead of it has ended.
    """
    col = tl.arange(0, LANES)
    there = col < columns
    factor = tl.load(norm + col, mask=there, other=0.0)
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * columns + col
    total = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(added + at, total.to(added.dtype.element_ty), mask=there)
    total *= tl.rsqrt(tl.sum(total * total, 0) / columns + epsilon)
    tl.store(out + at, total.to(out.dtype.element_ty) * factor, mask=there)


@triton.jit
def _gate(x, out, columns, LANES: tl.constexpr, DEPENDENT: tl.constexpr):
    """Computes `LANES` numbers of a row: those of its second half times SiLU of those of the first. `DEPENDENT` as of
    `_add_norm`."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    there = col < columns
    gate = tl.load(x + row * 2 * columns + col, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + col, mask=there, other=0.0)
    tl.store(out + row * columns + col, (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty) * up, mask=there)


def _options(x: Tensor, warps: int) -> dict[str, Any]:
    """Returns the options of a launch on a tensor's device."""
    dependent = can_depend(x)
    return {"DEPENDENT": dependent, "num_warps": warps} | ({"launch_pdl": True} if dependent else {})


def add_norm(x: Tensor, residual: Tensor, norm: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of x + residual, and the sum, which is not rounded before it is normed.

    Args:
        x, residual: [B, N], contiguous.
        norm: [N] weights.
    """
    added, out = torch.empty_like(x), torch.empty_like(x)
    lanes = triton.next_power_of_2(x.shape[1])
    warps = min(max(lanes // 512, 1), 16)
    _add_norm[(len(x),)](x, residual, norm, added, out, x.shape[1], epsilon, LANES=lanes, **_options(x, warps))
    return out, added


def gated(x: Tensor) -> Tensor:
    """Returns the second half of the columns, each multiplied with SiLU of the one of the first half.

    Args:
        x: [B, 2 N], contiguous.
    """
    columns = x.shape[1] // 2
    out = x.new_empty(len(x), columns)
    _gate[(len(x), triton.cdiv(columns, LANES))](x, out, columns, LANES=LANES, **_options(x, 4))
    return out
