"""Products of weights with few rows, on GPUs of compute capability 9.0 and newer: a kernel that asks for its weights
while the kernel before it still computes (Triton, NVIDIA's programmatic dependent launch).

A decode step of few sequences is a chain of short kernels, each of which reads its weights only after the one before it
has ended, so that the memory idles between any two of them. This file can go when vLLM's own products, or cuBLAS's, are
launched so.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton.language.extra import cuda

ROWS = 16
"""Most rows of such a product. A product of matrices takes 16 at least."""
MOST_COLUMNS = 32768
"""Columns from which on a product lasts so long that its beginning does not count."""
SMALLEST = 256
"""Inner dimension that the kernel needs, of which it takes multiples."""
HALVES = (torch.bfloat16, torch.float16)


class Tiles(NamedTuple):
    """Numbers that say how a product is divided."""

    columns: int
    """Columns of a program."""
    depth: int
    """Numbers of a part of the inner dimension that a program reads at once."""
    parts: int
    """Parts of what it reads at once, each summed by warps of its own. Products of few rows are short chains of
    instructions for tensor cores, each of which waits for the one before."""
    warps: int
    stages: int


NARROWS = 3
"""Most narrow programs for each multiprocessor. 384 of them, for queries, keys and values of a 4 B and an 8 B, spared
1.4 and 1.8 microseconds of a layer's 98 and 138 (as below)."""
ALONE, NARROW, WIDE = Tiles(16, 64, 4, 4, 9), Tiles(16, 64, 4, 4, 4), Tiles(32, 64, 2, 4, 4)
"""By the time of a 1.7 B's whole layer, for which 12 to 22 ways were tried of each product on an H200 (2026-11-29):
57 microseconds with 8 rows, where the tiles that were best for each product alone took 67. A kernel that begins early
finds its multiprocessors unevenly taken by the one ahead. So a product of no more programs than there are
multiprocessors takes more than half of the memory of each: there every program has one for itself."""


def tiles_for(columns: int, *, processors: int) -> Tiles:
    """Returns the tiles for a product of so many columns."""
    if columns <= processors * ALONE.columns:
        return ALONE
    return NARROW if columns <= NARROWS * processors * NARROW.columns else WIDE


@triton.jit
def _ask(pointers):
    """Asks for what lies there to be brought into the GPU's cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    weight,
    bias,
    out,
    rows,
    x_row,
    columns,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Computes `COLUMNS` columns of all rows.

    Args:
        DEPTH: inner dimension of the product.
        DEPENDENT: whether the kernel is launched before the one ahead of it has ended.
        AHEAD: numbers of each column's weights that are asked for before that one has ended.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, PARTS)[:, None] * AT_ONCE + tl.arange(0, AT_ONCE)[None, :]
    there = column < columns
    begin = weight + column.to(tl.int64) * DEPTH
    if DEPENDENT:
        # No earlier kernel of a step writes weights. A line of the cache has 64 of them.
        _ask(tl.where(there, begin, weight)[:, None] + tl.arange(0, AHEAD // 64)[None, :] * 64)
        cuda.gdc_wait()
        # Only now: a kernel that begins earlier would not know that those before this one have ended.
        cuda.gdc_launch_dependents()
    results = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, DEPTH, PARTS * AT_ONCE, num_stages=STAGES):
        at = first + inner
        left = tl.load(x + row[None, :, None] * x_row + at[:, None, :], mask=row[None, :, None] < rows, other=0.0)
        right = tl.load(begin[None, None, :] + at[:, :, None], mask=there[None, None, :], other=0.0)
        results = tl.dot(left, right, results)
    result = tl.sum(results, 0)
    if BIAS:
        result += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * columns + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(row[:, None] < rows) & there[None, :])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, *, dependent: bool) -> Tensor:
    """Returns x @ weight.T + bias.

    Args:
        x: [B, K], B at most ROWS.
        weight: [N, K], K a multiple of SMALLEST.
        dependent: whether the kernel begins before the one ahead of it has ended, which a GPU of compute capability
            9.0 can.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    out = x.new_empty(rows, columns)
    launch = {"launch_pdl": True} if dependent else {}
    _multiply[(triton.cdiv(columns, tiles.columns),)](
        x,
        weight,
        bias,
        out,
        rows,
        x.stride(0),
        columns,
        ROWS=ROWS,
        DEPTH=depth,
        COLUMNS=tiles.columns,
        PARTS=tiles.parts,
        AT_ONCE=tiles.depth,
        STAGES=tiles.stages,
        BIAS=bias is not None,
        DEPENDENT=dependent,
        AHEAD=SMALLEST,
        num_warps=tiles.warps,
        **launch,
    )
    return out


LIBRARY = torch.library.Library("rlframe", "FRAGMENT")
LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight.T + bias on a GPU, by the kernel above if x has few rows."""
    flat = x.view(-1, x.shape[-1]) if x.is_contiguous() else x
    if flat.ndim != 2 or flat.shape[0] > ROWS or flat.stride(-1) != 1 or not weight.is_contiguous():
        return linear(x, weight, bias)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    result = multiply(flat, weight, bias, tiles_for(len(weight), processors=processors), dependent=True)
    return result.view(*x.shape[:-1], len(weight))


def _shaped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns a tensor of the shape that `product` has."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


LIBRARY.impl("linear", product, "CUDA")
torch.library.register_fake("rlframe::linear", _shaped, lib=LIBRARY)


def install() -> None:
    """Makes vLLM's layers without quantisation compute products of few rows by the kernel above. Layers ask for the
    function in each call, so it may be done at any time before vLLM compiles the model."""
    from vllm import envs
    from vllm.model_executor.layers import utils

    own = utils.default_unquantized_gemm
    # Rows must not count where results may not depend on what else is in a step.
    if own.__module__ == __name__ or envs.VLLM_BATCH_INVARIANT:
        return

    def gemm(layer: torch.nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        columns, depth = weight.shape
        fits = columns <= MOST_COLUMNS and not depth % SMALLEST and weight.dtype in HALVES and x.dtype == weight.dtype
        return torch.ops.rlframe.linear(x, weight, bias) if fits else own(layer, x, weight, bias)

    utils.default_unquantized_gemm = gemm
