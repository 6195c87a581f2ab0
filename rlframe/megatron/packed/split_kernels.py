"""Sums of what two calls of attention have computed, on a GPU in one pass over memory (Triton)."""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8
"""Heads of a row that one program merges."""
BLOCK = 1024
"""Columns of a row that one program adds."""


@triton.jit
def _merge(out, lse, other, other_lse, rows, heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Merges some heads of a row."""
    row = tl.program_id(0)
    if tl.load(rows + row) != 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        col = tl.arange(0, WIDTH)
        place = row.to(tl.int64) * heads + head
        one = tl.load(lse + place, mask=head < heads, other=0.0)
        two = tl.load(other_lse + place, mask=head < heads, other=0.0)
        largest = tl.maximum(one, two)
        both = largest + tl.log(tl.exp(one - largest) + tl.exp(two - largest))
        inside = (head < heads)[:, None] & (col < width)[None, :]
        where = place[:, None] * width + col[None, :]
        mine = tl.load(out + where, mask=inside, other=0.0).to(tl.float32) * tl.exp(one - both)[:, None]
        theirs = tl.load(other + where, mask=inside, other=0.0).to(tl.float32) * tl.exp(two - both)[:, None]
        tl.store(out + where, (mine + theirs).to(out.dtype.element_ty), mask=inside)
        tl.store(lse + place, both, mask=head < heads)


@triton.jit
def _add(values, others, rows, width, BLOCK: tl.constexpr):
    """Adds some columns of a row."""
    row = tl.program_id(0)
    if tl.load(rows + row) != 0:
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        where = row.to(tl.int64) * width + col
        total = tl.load(values + where, mask=col < width, other=0.0).to(tl.float32)
        total += tl.load(others + where, mask=col < width, other=0.0).to(tl.float32)
        tl.store(values + where, total.to(values.dtype.element_ty), mask=col < width)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Tensor) -> None:
    """Makes `out` and `lse` those of attention to the keys of both calls, in some rows. Others are not read in `other`.

    Args:
        out: [T, heads, D] results of one call.
        lse: [T, heads, 1] float32 logarithms of its softmax's sums.
        other: those of the other call, which has other keys.
        rows: [T] bool.
    """
    assert all(each.is_contiguous() for each in (out, lse, other, other_lse))
    num_rows, heads, width = out.shape
    # Not torch's bool, whose pointers Triton's interpreter does not load.
    grid = (num_rows, triton.cdiv(heads, HEADS))
    shape = {"HEADS": HEADS, "WIDTH": triton.next_power_of_2(width)}
    _merge[grid](out, lse, other, other_lse, rows.view(torch.uint8), heads, width, **shape)


def add_(values: Tensor, others: Tensor, rows: Tensor) -> None:
    """Adds `others` to `values` in float32, in some rows. Those that are not among them are not read in `others`.

    Args:
        values: [T, ...].
        others: [T, ...].
        rows: [T] bool.
    """
    assert values.is_contiguous() and others.is_contiguous()
    width = values[:1].numel()
    grid = (len(values), triton.cdiv(width, BLOCK))
    _add[grid](values, others, rows.view(torch.uint8), width, BLOCK=BLOCK)
