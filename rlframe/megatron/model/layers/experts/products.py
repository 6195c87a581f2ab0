"""Products of the tokens of all experts of a layer with the experts' weights, by one kernel on a GPU (Triton).

Transformer Engine (2.20) has one CUTLASS kernel for them on Hopper, but its host makes and copies a table of all
experts' tensors for each: 0.5 ms for 128 experts alone, and in a profiled step over 12 layers of Qwen3-30B-A3B the GPU
waited 2 ms for each. Here the weights are one matrix, as Megatron's buffer has them. This file can go when Transformer
Engine holds the weights of all experts as one parameter on Hopper (`single_grouped_weight`), and Megatron uses it.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.megatron.model.layers.experts.stacked import Stacked, described, on_device

DTYPES = (torch.bfloat16, torch.float16)
"""Number formats of tokens and weights."""
ROWS, COLUMNS = 128, 128
"""Tokens of one expert, and columns of the product, that a program computes. All columns must be a multiple."""
INNER = 64
"""Terms of the sums that it reads at once. The inner size must be a multiple."""
WARPS, STAGES = 8, 3
"""Two programs share a multiprocessor. With 256 columns and four stages they are up to 12 % faster where experts have
equal shares of the tokens, and slower where shares are uneven."""


def multiply(
    rows: Float[Tensor, "T K"], weights: Stacked, counts: tuple[int, ...], *, transposed: bool
) -> Float[Tensor, "T N"]:
    """Returns the products [T, N] of each expert's tokens with its weight, or with the transpose of it.

    Args:
        rows: [T, K] by expert.
        weights: of each expert [O, I]. If transposed, K = I and N = O, and else the other way.
        counts: number of tokens of each expert.
    """
    inner, columns = reversed(weights.shape) if transposed else weights.shape
    out = rows.new_empty(len(rows), columns)
    if not len(rows):
        return out
    tiles = tiles_of(counts, ROWS, rows.device)
    _multiply[(len(tiles) * (columns // COLUMNS),)](
        described(rows, ROWS, INNER),
        described(weights.matrix, *((COLUMNS, INNER) if transposed else (INNER, COLUMNS))),
        described(out, ROWS, COLUMNS),
        out,
        tiles,
        columns,
        inner,
        weights.first,
        weights.step,
        TRANSPOSED=transposed,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        INNER=INNER,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


def multiplies(weights: Stacked) -> bool:
    """Returns whether the kernel takes weights: of 16 bits, and sizes that are multiples of its tiles."""
    is_even = not any(size % COLUMNS or size % INNER for size in weights.shape)
    return is_even and weights.matrix.dtype in DTYPES


@functools.lru_cache(maxsize=8)
def tiles_of(counts: tuple[int, ...], rows: int, device: torch.device) -> Int[Tensor, "N 3"]:
    """Returns [N, 3] expert, first token, and the first token behind the expert's, of each part of at most `rows`
    tokens of an expert. The products of a layer, forward and backward, ask for the same."""
    sizes = np.array(counts)
    parts = -(-sizes // rows)
    expert = np.repeat(np.arange(len(sizes)), parts)
    part = np.arange(len(expert)) - np.repeat(np.cumsum(parts) - parts, parts)
    ends = np.cumsum(sizes)
    found = np.stack([expert, (ends - sizes)[expert] + rows * part, ends[expert]], axis=1)
    return on_device(torch.from_numpy(found.astype(np.int32)), device)


@triton.jit(do_not_specialize=["first", "step"])
def _multiply(
    of_rows,
    of_weights,
    of_out,
    out,
    tiles,
    columns,
    inner,
    first,
    step,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Computes a block of the product of an expert's tokens. The first expert's weight is the one `first` in memory."""
    across = columns // COLUMNS
    tile, col = tl.program_id(0) // across, (tl.program_id(0) % across) * COLUMNS
    expert, row, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    # First row of the expert's weight: it has as many as the product has columns, or as its sums have terms.
    begin = (first + step * expert) * (columns if TRANSPOSED else inner)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for term in range(0, inner, INNER):
        if TRANSPOSED:
            weight = of_weights.load([begin + col, term]).T
        else:
            weight = of_weights.load([begin + term, col])
        sums = tl.dot(of_rows.load([row, term]), weight, sums)
    found = sums.to(out.dtype.element_ty)
    if row + ROWS <= end:
        of_out.store([row, col], found)
    else:
        # The rows behind are the next expert's.
        token, column = row + tl.arange(0, ROWS), col + tl.arange(0, COLUMNS)
        place = token.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out + place, found, mask=(token < end)[:, None])
