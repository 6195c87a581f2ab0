"""The gradient of rows that several sequences read, on a GPU in one pass over memory (Triton)."""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of columns that one program holds in registers at once."""


@triton.jit
def _row_sums(values, readers, starts, out, width, BLOCK: tl.constexpr):
    """Computes a block of a row."""
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        reader = tl.load(readers + place).to(tl.int64)
        total += tl.load(values + reader * width + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + col, total.to(out.dtype.element_ty), mask=inside)


def row_sums(values: Tensor, readers: Tensor, starts: Tensor) -> Tensor:
    """Returns [T, ...] the sum of the `values` of each row's readers, added up in float32 in their order.

    Args:
        values: [K, ...] value of each reader.
        readers: [K] int32, those of row 0, then those of row 1, and so on.
        starts: [T + 1] int32 bounds of the rows in `readers`.
    """
    values = values.contiguous()
    out = values.new_empty(len(starts) - 1, *values.shape[1:])
    width = values[:1].numel()
    if out.numel():
        _row_sums[(len(out), triton.cdiv(width, BLOCK))](values, readers, starts, out, width, BLOCK=BLOCK)
    return out
